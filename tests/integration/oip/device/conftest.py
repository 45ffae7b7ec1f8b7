"""A server on a GPU whose clients below `/v2` register memory that they have allocated."""

import pytest

from tests.integration.clients.device.serving import START_S


@pytest.fixture(scope="module")
def serving(launched):
    options = ("--oip-cuda-shared-memory", "--max-compiles-per-minute", "600")
    server = launched("--backend", "triton", *options, wait=False)
    server.wait_until_ready(START_S)
    return server


@pytest.fixture
def http(serving):
    with serving.client() as http:
        yield http
        assert http.post("/v2/cudasharedmemory/unregister").status_code == 200
        assert http.get("/v2/cudasharedmemory/status").json() == []
