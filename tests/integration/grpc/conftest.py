"""NVIDIA's own client of gRPC, of a server with a gateway."""

import os

import pytest
import torch

from tests.integration.harness.gateways import find_gateway_address
from tests.integration.harness.wire import packed

PREFIX = f"normserve-grpc-{os.getpid()}-"
NORM = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 1, 8)


@pytest.fixture(scope="module")
def speaking(launched):
    """A server that speaks gRPC, too, and lets clients register shared memory."""
    return launched("--grpc-port", "0", "--oip-shared-memory", PREFIX)


@pytest.fixture(scope="module")
def address(speaking):
    return find_gateway_address(speaking)


@pytest.fixture(scope="module")
def client(address):
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture
def registered(speaking):
    """The name of a LayerNorm of eight channels, eps 1e-3 and relu."""
    weight, bias = NORM
    query = {"op": "layer_norm", "eps": "1e-3", "activation": "relu"}
    headers = {"content-type": "application/x-safetensors"}
    name = "blocks.0.norm"
    with speaking.client() as api:
        content = packed(weight=weight, bias=bias)
        assert api.put(f"/v1/layers/{name}", params=query, content=content, headers=headers).is_success
        yield name
        api.delete(f"/v1/layers/{name}")
