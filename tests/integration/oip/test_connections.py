"""Connections that are too many, as NVIDIA's client shows them."""

import asyncio
import socket

import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

REFUSED = "max_connections_per_address are open already"


@pytest.fixture(scope="module")
def full(launched):
    """The authority of a server that has all the connections that it may have."""
    server = launched("--max-connections-per-address", "1", "--header-timeout-s", "60")
    with socket.create_connection(server.address) as first:
        first.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        yield server.url.removeprefix("http://")


def test_the_exception_says_why(full):
    for _ in range(10):
        with (
            triton.InferenceServerClient(full) as client,
            pytest.raises(InferenceServerException, match=REFUSED) as refused,
        ):
            client.get_server_metadata()
        assert refused.value.message() == REFUSED
        assert refused.value.status() == "503"


def test_over_asyncio(full):
    async def call() -> None:
        async with triton_aio.InferenceServerClient(full) as client:
            with pytest.raises(InferenceServerException, match=REFUSED):
                await client.get_server_metadata()

    asyncio.run(call())
