"""Every caller sends the request that the others send, and gives back the array that came."""

import asyncio

import numpy as np
import pytest
from normserve.codec import safetensors

from benchmarks.serve.clients.python_callers import CALLERS, ServerEndpoint
from tests.service.client.harness.raw_server import RawServer
from tests.service.client.harness.small_call import ANSWER, X


def next_request(connected):
    """A step that waits for the next request."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += connected.recv(2**16) or b"\r\n\r\n"


@pytest.mark.parametrize("name", CALLERS)
def test_a_caller_sends_an_array_and_returns_one(name):
    server = RawServer([[ANSWER, next_request, ANSWER, next_request, ANSWER]])
    try:
        with asyncio.Runner() as runner, CALLERS[name](ServerEndpoint(server.url, "bench"), X, runner) as caller:
            times = caller.measure(3, 0.0)
    finally:
        server.close()
    assert len(times.seconds) == 3
    np.testing.assert_array_equal(times.results[0], X)
    head, _, body = server.heads[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/layer_norm?layer=bench HTTP/1.1\r\n")
    # Python's httpx sends head and body apart.
    if body:
        np.testing.assert_array_equal(
            np.frombuffer(safetensors.decode(memoryview(body))["x"].data, "<f4"), X.ravel()
        )
