"""What tests of tensors in the memory of the server's GPU have in common."""

import re

import httpx
import torch
from normserve.client import RetryPolicy

# A cold start compiles every kernel that the configuration foresees.
START_S = 300


ONCE = RetryPolicy(tries=1)


def metric(serving, name: str, label: str = "") -> float:
    """The sum of a metric's series, of those that have this label if one is given."""
    text = httpx.get(serving.url + "/metrics").text
    lines = [line for line in text.splitlines() if re.match(rf"normserve_{name}[ {{]", line) and label in line]
    return sum(float(line.split()[-1]) for line in lines)


def random(*shape, seed=0, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype)


def assert_same(got, right):
    for name in right.__slots__:
        expected, found = getattr(right, name), getattr(got, name)
        if name != "timing":
            assert (found is None) == (expected is None), name
            if expected is not None:
                assert found.device == expected.device, name
                assert torch.equal(found, expected), name
