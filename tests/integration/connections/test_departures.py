"""Clients that leave while their response is sent: each is counted once, and leaves nothing behind."""

import socket

import numpy as np
import pytest

from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import npy

_LEFT = 'normserve_cancelled_total{stage="send"}'


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(scope="module")
def fresh(launched):
    return launched()


# What is left of the shorter one fits into the kernel's buffers: the server is done with it when the client leaves.
@pytest.mark.parametrize(("rows", "clients"), [(1000, 25), (8000, 10)])
@pytest.mark.parametrize("buffer_bytes", [None, 65536], ids=["any-buffer", "small-buffer"])
def test_every_client_that_leaves_before_it_has_read_its_response_is_counted(
    fresh, until, rows, clients, buffer_bytes
):
    body = npy(np.ones((rows, 1024), np.float32))
    request = head("/v1/layer_norm", f"Content-Length: {len(body)}") + body
    with fresh.client() as api:
        before = samples(api).get(_LEFT, 0)
        for index in range(clients):
            with Connection(fresh.address) as connection:
                if buffer_bytes is not None:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
                connection.sendall(request)
                left = 1 + len(body) * index * 5 // (clients * 6)
                while left:
                    left -= len(connection.recv(min(left, 65536)))
        until(lambda: samples(api)[_LEFT] - before >= clients)
        until(lambda: samples(api)["normserve_inflight_requests"] == 0)
        assert samples(api)[_LEFT] - before == clients


def test_clients_that_read_it_all_are_not_counted(fresh, until):
    body = npy(np.ones((1000, 1024), np.float32))
    request = head("/v1/layer_norm", f"Content-Length: {len(body)}")
    with fresh.client() as api:
        before = samples(api).get(_LEFT, 0)
        for line in (b"", b"Connection: close\r\n"):
            for _ in range(5):
                with Connection(fresh.address) as connection:
                    connection.sendall(request[:-2] + line + b"\r\n" + body)
                    assert len(connection.answer().content) == len(body)
        until(lambda: samples(api)["normserve_inflight_requests"] == 0)
        assert samples(api).get(_LEFT, 0) == before
