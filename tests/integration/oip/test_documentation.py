"""What the page for those who come from Triton shows works as it is shown."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from normserve.grpc.statuses import STATUSES
from tritonclient.utils import shared_memory as shm

from tests.integration.harness.gateways import find_gateway_address
from tests.integration.oip.models import CASES, random

PAGE = (Path(__file__).parents[3] / "docs/coming-from-triton.md").read_text(encoding="utf-8")


# What shows CUDA memory runs on a GPU.
CODE, GRPC_CODE, SHARING_CODE, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_runs(server):
    run_example(CODE.replace("norms.example:8000", server.url.removeprefix("http://")))


def test_the_example_of_grpc_runs(launched):
    run_example(GRPC_CODE.replace("norms.example:8001", find_gateway_address(launched("--grpc-port", "0"))))


def run_example(code):
    hidden = random(3, 16)
    known = {"hidden": hidden}
    exec(code, known)
    known["client"].close()
    wanted = torch.nn.functional.layer_norm(torch.from_numpy(hidden), (16,))
    np.testing.assert_allclose(known["y"], wanted, atol=1e-5)


def test_every_status_is_told():
    table = PAGE.partition("| HTTP | gRPC |")[2].partition("\n\n")[0]
    for status, code in STATUSES.items():
        (row,) = [each for each in table.splitlines() if f"{status}" in each.partition("| `")[0]]
        assert f"`{code.name}`" in row


def test_the_example_of_shared_memory_runs(launched):
    prefix = f"normserve-test-{os.getpid()}-"
    server = launched("--oip-shared-memory", prefix)
    hidden = random(3, 16)
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        known = {"hidden": hidden, "client": client, "triton": triton}
        exec(SHARING_CODE.replace('"norms-', f'"{prefix}'), known)
    wanted = torch.nn.functional.layer_norm(torch.from_numpy(hidden), (16,))
    np.testing.assert_allclose(known.pop("y"), wanted, atol=1e-5)
    shm.destroy_shared_memory_region(known["region"])


@pytest.mark.parametrize("op", CASES)
def test_every_tensor_of_a_model_is_told(client, op):
    for model in (op, f"{op}_backward"):
        told = client.get_model_metadata(model)
        for each in (*told["inputs"], *told["outputs"]):
            assert f"`{each['name']}`" in PAGE


def test_what_is_advertised_is_told_and_the_rest_is_not_advertised(client):
    extensions = set(client.get_server_metadata()["extensions"])
    assert not extensions & {"classification", "sequence", "schedule_policy", "trace", "logging", "generate"}
