"""Requests that are refused by their header: who still sends gets the response, and keeps the connection."""

import contextlib
import socket
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from normserve.client import ApiError, Client, RetryPolicy
from normserve.client.http import connection_pool
from normserve.client.http.socket_opening import make_socket

from tests.integration.harness.raw import Answer, Connection, head
from tests.integration.harness.wire import assert_problem

KEY = "Authorization: Bearer secret"
MIB = 2**20
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
# There is one place, which `busy` takes; a request that waits for its body is not taken for stalled meanwhile.
OPTIONS = ("--api-key", "secret", "--max-body-bytes", str(70 * MIB), "--max-inflight-requests", "1")
PATIENT = ("--body-grace-s", "600")


@pytest.fixture(scope="module", params=["http", "https"])
def guarded(request, launched, ours):
    """A server that wants a key, and a way to connect to it."""
    options = ours.options() if request.param == "https" else ()
    server = launched(*OPTIONS, *PATIENT, *options)

    def connect() -> socket.socket:
        plain = Connection(server.address)
        if request.param == "http":
            return plain
        return ours.trust().wrap_socket(plain, server_hostname="localhost")

    yield server, connect
    assert "Traceback" not in server.log


@contextlib.contextmanager
def busy(connect):
    """All places for requests are taken."""
    with connect() as connection:
        connection.sendall(head("/v1/layer_norm", "Content-Length: 100", KEY, "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        yield


def received(connection: socket.socket) -> Answer:
    """One response, on a socket of any kind."""
    raw = b""
    while True:
        piece = connection.recv(65536)
        assert piece, f"the server closed after {raw!r}"
        raw += piece
        if b"\r\n\r\n" in raw:
            answer = Answer(raw)
            if len(answer.content) == int(answer.headers["content-length"]):
                return answer


@pytest.mark.parametrize(
    ("status", "nbytes", "lines"), [(401, 80 * MIB, ()), (413, 80 * MIB, (KEY,)), (429, 68 * MIB, (KEY,))]
)
def test_refusal_is_there_after_the_whole_body(guarded, status, nbytes, lines):
    _, connect = guarded
    piece = bytes(8 * MIB)
    with contextlib.ExitStack() as stack:
        if status == 429:
            stack.enter_context(busy(connect))
        connection = stack.enter_context(connect())
        for _ in range(2):
            connection.sendall(head("/v1/layer_norm", f"Content-Length: {nbytes}", *lines))
            for start in range(0, nbytes, len(piece)):
                connection.sendall(piece[: nbytes - start])
            answer = received(connection)
            assert_problem(answer, status)
            assert ("retry-after" in answer.headers) == (status == 429)
            assert "connection" not in answer.headers


def test_refusal_is_there_after_a_body_that_took_more_than_two_seconds(guarded):
    server, connect = guarded
    if server.url.startswith("https"):
        # It takes more than two seconds, and encryption makes no difference to it.
        return
    with connect() as connection:
        connection.sendall(head("/v1/layer_norm", "Content-Length: 2200000"))
        for _ in range(22):
            connection.sendall(bytes(100_000))
            time.sleep(0.1)
        assert_problem(received(connection), 401)
        connection.sendall(LIVEZ)
        assert received(connection).status_code == 200


def test_urllib_learns_why(guarded, ours):
    server, _ = guarded
    request = urllib.request.Request(f"{server.url}/v1/layer_norm", bytes(80 * MIB))
    context = ours.trust() if server.url.startswith("https") else None
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=20, context=context)
    with refusal.value as answer:
        assert answer.code == 401


@pytest.mark.parametrize("nbytes", [0, 60_000, 100_000, MIB, 5 * MIB], ids=str)
def test_refused_requests_keep_their_connection(guarded, nbytes):
    _, connect = guarded
    with connect() as connection:
        for path, lines, status in (
            ("/v1/layer_norm", (), 401),
            ("/v1/layer_norm?eps=0", (KEY,), 422),
            ("/nowhere", (KEY,), 404),
        ):
            connection.sendall(head(path, f"Content-Length: {nbytes}", *lines) + bytes(nbytes))
            answer = received(connection)
            assert answer.status_code == status
            assert "connection" not in answer.headers


def test_refused_chunked_body_keeps_its_connection(guarded):
    _, connect = guarded
    chunks = (b"%x\r\n" % MIB + bytes(MIB) + b"\r\n") * 5
    with connect() as connection:
        for _ in range(2):
            connection.sendall(head("/v1/layer_norm", "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n")
            answer = received(connection)
            assert_problem(answer, 401)
            assert "connection" not in answer.headers


@pytest.mark.parametrize("lines", [("Connection: close",), ()], ids=["close", "1.0"])
def test_refusal_of_a_last_request_is_read_before_the_end(guarded, lines):
    _, connect = guarded
    request = head("/v1/layer_norm", f"Content-Length: {80 * MIB}", *lines)
    if not lines:
        request = request.replace(b"HTTP/1.1", b"HTTP/1.0")
    with connect() as connection:
        connection.sendall(request)
        for _ in range(10):
            connection.sendall(bytes(8 * MIB))
        answer = received(connection)
        assert_problem(answer, 401)
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""


def test_requests_behind_a_refused_body_are_answered_in_order(guarded):
    _, connect = guarded
    with connect() as connection:
        refused = head("/v1/layer_norm", "Content-Length: 300000") + bytes(300_000)
        connection.sendall(LIVEZ + refused + LIVEZ + refused + LIVEZ.replace(b"/livez", b"/nowhere"))
        raw = b""
        while raw.count(b"HTTP/1.1 ") < 5:
            piece = connection.recv(65536)
            assert piece
            raw += piece
    statuses = [int(each[:3]) for each in raw.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 401, 200, 401, 401]


def test_client_that_reads_while_it_sends_keeps_its_connection(guarded, ours, monkeypatch):
    server, _ = guarded
    opened = []
    monkeypatch.setattr(connection_pool, "make_socket", lambda family: opened.append(family) or make_socket(family))
    with Client(server.url, retries=RetryPolicy(tries=1), verify=ours.trust()) as client:
        for _ in range(5):
            with pytest.raises(ApiError) as refusal:
                client.layer_norm(np.zeros((250, 1024), np.float32))
            assert refusal.value.status == 401
    assert len(opened) == 1


def test_client_that_waits_for_leave_is_refused_at_once(guarded):
    _, connect = guarded
    with connect() as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {MIB}", "Expect: 100-continue"))
        answer = received(connection)
        assert_problem(answer, 401)
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("lines", "status"),
    [(("Transfer-Encoding: gzip, chunked",), 501), (("Content-Length: 5", f"Content-Length: {5 * MIB}"), 400)],
)
def test_response_to_invalid_input_is_there_after_the_body(guarded, lines, status):
    _, connect = guarded
    with connect() as connection:
        connection.sendall(head("/v1/layer_norm", *lines) + bytes(5 * MIB))
        answer = received(connection)
        assert_problem(answer, status)
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""
