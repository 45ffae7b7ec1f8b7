"""A server on a GPU whose clients of gRPC register memory that they have allocated."""

import pytest

from tests.integration.clients.device.serving import START_S
from tests.integration.harness.gateways import find_gateway_address


@pytest.fixture(scope="module")
def serving(launched):
    options = ("--oip-cuda-shared-memory", "--max-compiles-per-minute", "600", "--grpc-port", "0")
    server = launched("--backend", "triton", *options, wait=False)
    server.wait_until_ready(START_S)
    return server


@pytest.fixture
def client(serving):
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(find_gateway_address(serving)) as client:
        yield client
        client.unregister_cuda_shared_memory()
        assert not client.get_cuda_shared_memory_status().regions


@pytest.fixture
def http(serving):
    with serving.client() as http:
        yield http
