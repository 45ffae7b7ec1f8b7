"""What no honest client sends: each is refused or closed, and the next plain request succeeds."""

import re
import socket
import threading
import time

import httpx
import pytest

from tests.integration.harness.raw import Connection, exchange, head
from tests.integration.harness.wire import X, assert_alive, assert_problem, npy

BODY = npy(X)
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.fixture(autouse=True)
def alive_afterwards(api):
    yield
    assert_alive(api)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_long_query_within_the_limit(server):
    answer = exchange(server.address, head("/livez?" + "a" * 60_000, "Connection: close"))
    assert_problem(answer, 405)


@pytest.mark.parametrize("expect", [[], ["Expect: 100-continue"]])
def test_announced_length_above_the_limit_is_refused_unread(server, expect):
    with Connection(server.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {2**40}", *expect))
        answer = connection.answer()
        assert_problem(answer, 413, "too_large")
        assert answer.headers["connection"] == "close"


def test_refusal_reaches_a_client_that_is_still_sending(server):
    with Connection(server.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {2**40}") + bytes(2**20))
        assert_problem(connection.answer(), 413, "too_large")


def test_chunked_body_is_cut_off_at_the_limit(start_server, api):
    small = start_server("--max-body-bytes", "100000")
    with Connection(small.address) as connection:
        connection.sendall(head("/v1/layer_norm", "Transfer-Encoding: chunked"))
        sent = 0
        try:
            while sent < 2**28:
                connection.sendall(chunk(bytes(65536)))
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 2**28
    with Connection(small.address) as connection:
        connection.sendall(head("/v1/layer_norm", "Transfer-Encoding: chunked") + chunk(bytes(150_000)))
        assert_problem(connection.answer(), 413, "too_large")


def test_expect_is_continued_when_the_body_is_wanted(server):
    with Connection(server.address) as connection:
        connection.sendall(head("/v1/layer_norm", LENGTH, "Expect: 100-continue"))
        assert connection.answer().status_code == 100
        connection.sendall(BODY)
        assert connection.answer().status_code == 200


@pytest.mark.parametrize(
    ("path", "lines", "status"),
    [
        ("/v1/layer_norm", ["Content-Encoding: br"], 415),
        ("/v1/layer_norm", ["Content-Type: application/zip"], 415),
        ("/v1/layer_norm?eps=0", [], 422),
        ("/nope", [], 404),
    ],
)
def test_refused_expectation_is_not_continued(server, path, lines, status):
    answer = exchange(server.address, head(path, LENGTH, "Expect: 100-continue", *lines))
    assert answer.status_code == status
    assert answer.headers["connection"] == "close"


def test_connection_survives_a_refused_small_body(server):
    with Connection(server.address) as connection:
        for _ in range(3):
            connection.sendall(head("/v1/layer_norm?eps=0", LENGTH) + BODY)
            assert_problem(connection.answer(), 422)
        connection.sendall(head("/v1/layer_norm", LENGTH) + BODY)
        assert connection.answer().status_code == 200


def test_body_to_a_route_that_takes_none(server):
    with Connection(server.address) as connection:
        for _ in range(2):
            request = head("/livez", LENGTH).replace(b"POST", b"GET") + BODY
            connection.sendall(request)
            assert connection.answer().content == b"ok\n"


def test_pipelined_requests_are_answered_in_order(server):
    first = head("/v1/layer_norm", LENGTH) + BODY
    second = b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with Connection(server.address) as connection:
        connection.sendall(first + second + last)
        received = connection.everything()
    assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"200", b"404", b"200"]


def test_http_1_0(server):
    answer = exchange(server.address, b"GET /livez HTTP/1.0\r\n\r\n")
    assert answer.content == b"ok\n"


def test_disconnect_while_the_body_is_received(server, api, until):
    for sent in (0, 1, 100, 5000):
        with Connection(server.address) as connection:
            connection.sendall(head("/v1/layer_norm", "Content-Length: 10000000") + bytes(sent))
            until(lambda: inflight(api) == (1, 10_000_000))
        until(lambda: inflight(api) == (0, 0))


def test_disconnect_while_computing_or_sending(server, api, until):
    body = npy(X.repeat(200_000, axis=0))
    for _ in range(3):
        with Connection(server.address) as connection:
            connection.sendall(head("/v1/rms_norm", f"Content-Length: {len(body)}") + body)
        until(lambda: inflight(api) == (0, 0))


def test_disconnect_while_sending_leaves_nothing_in_flight(server, api, until):
    body = npy(X.repeat(400_000, axis=0))
    with Connection(server.address) as connection:
        # The kernel would grow the buffer until it held the whole response.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: inflight(api) == (0, 0))


def test_many_clients_that_leave_at_any_moment(server, api, until):
    body = npy(X.repeat(5_000, axis=0))
    request = head("/v1/layer_norm", f"Content-Length: {len(body)}") + body

    def leave_after(fraction: float) -> None:
        with Connection(server.address) as connection:
            connection.sendall(request[: int(len(request) * fraction)])
            time.sleep(fraction / 100)

    threads = [threading.Thread(target=leave_after, args=(index / 40,)) for index in range(1, 41)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: inflight(api) == (0, 0))


def inflight(api) -> tuple[int, int]:
    """Requests and bytes that the server says are inside."""
    lines = dict(line.rsplit(" ", 1) for line in api.get("/metrics").text.splitlines() if not line.startswith("#"))
    return int(float(lines["normserve_inflight_requests"])), int(float(lines["normserve_inflight_bytes"]))


class TestSlowClients:
    @pytest.fixture
    def impatient(self, start_server):
        return start_server("--header-timeout-s", "0.3", "--body-timeout-s", "0.3", "--send-timeout-s", "0.3")

    def test_slow_header(self, impatient):
        with Connection(impatient.address) as connection:
            connection.sendall(b"POST /v1/layer_norm HTTP/1.1\r\nHost:")
            assert_problem(connection.answer(), 408, "request_timeout")
            assert connection.everything() == b""

    def test_silent_connection_is_closed(self, impatient):
        with Connection(impatient.address) as connection:
            assert connection.everything() == b""

    def test_slow_body(self, impatient):
        with Connection(impatient.address) as connection:
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY[:-1])
            answer = connection.answer()
            assert_problem(answer, 408, "request_timeout")
            assert answer.headers["connection"] == "close"

    def test_client_that_never_reads(self, start_server, until):
        impatient = start_server("--send-timeout-s", "0.3")
        body = npy(X.repeat(1_000_000, axis=0))
        request = head("/v1/layer_norm", f"Content-Length: {len(body)}") + body
        with httpx.Client(base_url=impatient.url, verify=False) as api, Connection(impatient.address) as connection:
            connection.sendall(request)
            until(lambda: 'normserve_cancelled_total{stage="send"} 1.0' in api.get("/metrics").text)
            until(lambda: inflight(api) == (0, 0))
