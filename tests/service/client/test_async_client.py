"""The asynchronous client is the blocking one with awaits: the same methods, retries and errors."""

import asyncio
import inspect

import httpx
import numpy as np
import pytest
from normserve.client import AsyncClient, Client, ConnectionFailedError, OverloadedError, RetryPolicy

from .harness.fake_server import FakeServer, problem_answer, tensors_answer

X = np.ones((2, 300_000), np.float32)


def run(server, use):
    async def main():
        retries = RetryPolicy(tries=3, first_pause_s=0)
        async with AsyncClient(transport=httpx.MockTransport(server), retries=retries) as client:
            return await use(client)

    return asyncio.run(main())


def public(kind):
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_both_clients_have_the_same_methods():
    assert public(Client).keys() == public(AsyncClient).keys()
    for name, method in public(AsyncClient).items():
        assert inspect.iscoroutinefunction(method)
        assert inspect.signature(method).parameters == inspect.signature(public(Client)[name]).parameters
        assert method.__doc__


def test_requests_run_side_by_side():
    server = FakeServer(tensors_answer(y=X))
    results = run(server, lambda client: asyncio.gather(*(client.layer_norm(X) for _ in range(3))))
    assert len(server.requests) == 3
    for result in results:
        np.testing.assert_array_equal(result.y, X)


def test_a_body_of_many_chunks_arrives_whole():
    server = FakeServer(tensors_answer(y=X))
    run(server, lambda client: client.layer_norm(X))
    np.testing.assert_array_equal(server.tensors["x"], X)
    assert int(server.request.headers["content-length"]) == len(server.request.content)


def test_it_retries_and_gives_up_as_the_blocking_one():
    busy = problem_answer(429, "overloaded", **{"retry-after": "0"})
    server = FakeServer(busy, httpx.ConnectError("refused"), tensors_answer(y=X))
    run(server, lambda client: client.layer_norm(X))
    assert len(server.requests) == 3
    with pytest.raises(OverloadedError):
        run(FakeServer(busy), lambda client: client.layer_norm(X))
    with pytest.raises(ConnectionFailedError):
        run(FakeServer(httpx.ReadError("reset")), lambda client: client.layer_norm(X))
