"""NVIDIA's own client of gRPC, of a server with a gateway."""

import os

import pytest

from tests.integration.harness.gateways import find_gateway_address

PREFIX = f"normserve-grpc-{os.getpid()}-"


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
    # Late, since it imports a client that tests on a GPU do without.
    from tests.integration.oip.models import register_norm

    with speaking.client() as api, register_norm(api) as name:
        yield name
