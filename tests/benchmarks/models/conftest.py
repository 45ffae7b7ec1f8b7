"""A model that a CPU runs in moments, and a `fusednorm.patch` that needs no kernel."""

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.models import architectures, suite
from benchmarks.models.architectures import ModelArchitecture

TINY = ModelArchitecture(
    # torch 2.13 for CPUs dies in the backward of a channels-last GroupNorm whose x asks for no gradient.
    lambda shape: nn.Sequential(nn.Conv2d(shape[1], shape[1], 1), nn.GroupNorm(4, shape[1])),
    architectures._make_image_inputs("input", torch.channels_last),
    architectures._make_no_inputs,
    architectures._compute_mean_square,
    torch.channels_last,
)


def patch(model, eps=None):
    """Replace the forward of every GroupNorm by the same."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.forward = lambda x, norm=module: F.group_norm(
                x, norm.num_groups, norm.weight, norm.bias, norm.eps if eps is None else eps
            )
    return "a report"


@pytest.fixture
def patching(monkeypatch):
    """Set what `fusednorm.patch` is."""

    def put(replacement):
        monkeypatch.setattr(fusednorm, "patch", replacement, raising=False)

    put(patch)
    return put


@pytest.fixture
def tiny(monkeypatch):
    """The architecture `blocks` on a CPU, two short rounds of timing, and graphs that only call."""
    monkeypatch.setitem(architectures.ARCHITECTURES, "blocks", TINY)
    monkeypatch.setattr("gc.collect", lambda: 0)  # of all that tests have imported it takes long
    monkeypatch.setattr(suite, "fix_triton_cache", lambda: None)
    monkeypatch.setattr(suite, "ROUNDS", 2)
    monkeypatch.setattr(suite, "CALLS", 1)

    class FakeGraph:
        def __init__(self, call, clear):
            clear()
            self.replay = call

    monkeypatch.setattr("benchmarks.models.model_passes.PassGraph", FakeGraph)
    return suite.ModelSuite(device="cpu")
