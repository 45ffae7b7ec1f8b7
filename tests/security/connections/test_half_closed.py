"""Clients that end their side of the connection: answered if they still read, forgotten if they have gone."""

import re
import socket

import numpy as np
import pytest

from tests.integration.harness.raw import Answer, head
from tests.integration.harness.wire import X, npy

LARGE = npy(np.random.default_rng(0).standard_normal((3000, 1024), dtype=np.float32))
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def operation(body: bytes, *lines: str) -> bytes:
    return head("/v1/layer_norm", f"Content-Length: {len(body)}", *lines) + body


def chunked(body: bytes) -> bytes:
    pieces = (body[at : at + 60_000] for at in range(0, len(body), 60_000))
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head("/v1/layer_norm", "Transfer-Encoding: chunked") + framed + b"0\r\n\r\n"


WHOLE = {
    "small": [operation(npy(X))],
    "large": [operation(LARGE)],
    "chunked": [chunked(LARGE)],
    "no-body": [LIVEZ],
    "pipelined": [LIVEZ, operation(npy(X)), LIVEZ],
    "pipelined-large": [operation(LARGE), LIVEZ],
    "many": [LIVEZ] * 300,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("uds") / "socket"


@pytest.fixture(scope="module")
def both(launched, path):
    """A server at a port and at a Unix socket."""
    return launched("--uds", str(path))


@pytest.fixture(params=["tcp", "unix"])
def connect(request, both, path):
    def make() -> socket.socket:
        unix = request.param == "unix"
        connection = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        connection.settimeout(20)
        connection.connect(str(path) if unix else both.address)
        return connection

    return make


def everything(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(2**20):
        pieces.append(piece)
    return b"".join(pieces)


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(autouse=True)
def nothing_is_left(both, until):
    yield
    with both.client() as api:
        names = ('normserve_slab_bytes{state="used"}', "normserve_inflight_requests", "normserve_inflight_bytes")
        until(lambda: not any(samples(api)[name] for name in names))
        until(lambda: samples(api)["normserve_connections"] == 1)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("behind", [b"", b"GET /liv", operation(npy(X))[:-1]], ids=["", "header", "body"])
def test_whole_requests_are_answered(connect, name, behind):
    requests = WHOLE[name]
    with connect() as connection:
        connection.sendall(b"".join(requests) + behind)
        connection.shutdown(socket.SHUT_WR)
        rest = everything(connection)
    for _ in requests:
        answer = Answer(rest)
        assert answer.status_code == 200
        assert len(answer.content) == int(answer.headers["content-length"])
        rest = answer.rest
    assert rest == b""


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /liv", operation(npy(X))[:-1], operation(LARGE)[:-1], chunked(LARGE)[:-1], chunked(LARGE)[:-2]],
    ids=["nothing", "header", "small", "large", "chunked", "last-trailer"],
)
def test_incomplete_ones_are_closed(connect, sent):
    with connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == b""


def test_malformed_one_behind_is_refused(connect):
    with connect() as connection:
        connection.sendall(LIVEZ + b"GARBAGE\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert re.findall(rb"HTTP/1\.1 (\d+)", everything(connection)) == [b"200", b"400"]


def test_request_that_waits_is_withdrawn_where_its_client_has_gone_and_only_there(stage_of):
    stage = stage_of()
    running = stage.occupy_device()
    with socket.create_connection(stage.server.address, 20) as reads:
        reads.sendall(operation(npy(X)))
        reads.shutdown(socket.SHUT_WR)
        stage.wait_for_queue(1)
        with socket.create_connection(stage.server.address) as leaves:
            leaves.sendall(operation(npy(X)))
            stage.wait_for_queue(2)
        stage.wait_for_queue(1)
        stage.open_gate()
        answer = Answer(everything(reads))
    assert running.result().status_code == 200
    assert answer.status_code == 200
    assert answer.headers["connection"] == "close"
    assert 'normserve_cancelled_total{stage="queue"} 1.0' in stage.http.get("/metrics").text
