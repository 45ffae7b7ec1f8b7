"""Requests behind one another on a connection: answered in order, bounded, and gone with their client."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import X, assert_problem, npy

BODY = npy(X)
LENGTH = f"Content-Length: {len(BODY)}"
OPERATION = head("/v1/layer_norm", LENGTH) + BODY
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def statuses(received: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", received)


def test_what_is_malformed_is_refused_after_the_answers_before_it(server):
    with Connection(server.address) as connection:
        connection.sendall(OPERATION + LIVEZ + b"\x00garbage\r\n\r\n")
        assert statuses(connection.everything()) == [b"200", b"200", b"400"]


def test_header_that_stays_incomplete_is_refused_after_the_answer_before_it(start_server):
    impatient = start_server("--header-timeout-s", "0.3")
    with Connection(impatient.address) as connection:
        connection.sendall(OPERATION + b"GET /livez HT")
        assert connection.answer().status_code == 200
        assert_problem(connection.answer(), 408, "request_timeout")
        assert connection.everything() == b""


def test_empty_lines_do_not_keep_a_connection_open(start_server):
    impatient = start_server("--header-timeout-s", "0.3", "--keep-alive-s", "1")
    with Connection(impatient.address) as connection:
        connection.sendall(LIVEZ)
        assert connection.answer().status_code == 200
        connection.sendall(b"\r\n")
        assert connection.everything() == b""


def test_next_request_after_a_declined_upgrade(server):
    lines = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")
    upgrade = b"\r\n".join((b"GET /livez HTTP/1.1", b"Host: localhost", *lines, b"", b""))
    with Connection(server.address) as connection:
        for _ in range(2):
            connection.sendall(upgrade)
            assert connection.answer().status_code == 200
            connection.sendall(OPERATION)
            assert connection.answer().status_code == 200


def test_expectation_of_http_1_0_is_ignored(server):
    request = head("/v1/layer_norm", LENGTH, "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    with Connection(server.address) as connection:
        connection.sendall(request)
        time.sleep(0.1)
        connection.sendall(BODY)
        assert statuses(connection.everything()) == [b"200"]


def test_whoever_sends_without_end_is_read_as_fast_as_it_is_answered(server):
    before = server.resident_bytes()
    with Connection(server.address) as connection, ThreadPoolExecutor(1) as sender:
        sender.submit(connection.sendall, LIVEZ * 100_000)
        answers = 0
        while answers < 500:
            answers += len(statuses(connection.recv(2**20)))
        assert server.resident_bytes() - before < 20 * 2**20
        connection.shutdown(socket.SHUT_RDWR)
