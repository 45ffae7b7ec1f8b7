"""The connection against a socket that says what it is told to."""

import select
import socket
import ssl
import time
from contextlib import suppress

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from normload.clients.http_connection import HttpLoadConnection
from normserve.client import ClientError, ConnectionFailedError, RequestTimeoutError, UnexpectedAnswerError
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import TlsSettings

from tests.loadtest.clients.scripted import Scripted, drains, ends, says, takes

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: value\r\n\r\nhello"


HEAD = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n"
WHOLE = len(HEAD) + 3
MOST = 2**23


def test_a_connection_is_used_again():
    server = Scripted([takes(WHOLE), says(OK), takes(WHOLE), says(OK)])
    connection = server.connection()
    for _ in range(2):
        answer = connection.exchange(HEAD, [b"a", memoryview(b"bc")], MOST)
        assert (answer.status, bytes(answer.body), answer.headers["x-name"]) == (200, b"hello", "value")
    server.join()
    assert server.accepted == 1
    assert server.received == [HEAD + b"abc"] * 2
    connection.close()


@pytest.mark.parametrize("cut", [3, 20, 60, len(OK) - 2])
def test_an_answer_may_come_in_pieces(cut):
    server = Scripted([takes(WHOLE), says(OK[:cut], OK[cut:])])
    connection = server.connection()
    assert bytes(connection.exchange(HEAD, [b"abc"], MOST).body) == b"hello"
    connection.close()


def test_large_bodies_arrive_whole():
    body = bytes(range(256)) * 2**14
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    server = Scripted([takes(len(HEAD) + len(body)), says(head + body)])
    connection = server.connection()
    answer = connection.exchange(HEAD, [body[:100], memoryview(body)[100:]], MOST)
    assert answer.body == body
    server.join()
    assert server.received == [HEAD + body]
    connection.close()


def test_a_refusal_ends_the_upload():
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
    server = Scripted([takes(len(HEAD)), says(refusal), drains], [takes(WHOLE), says(OK)])
    connection = server.connection()
    assert connection.exchange(HEAD, [bytes(2**28)], MOST).status == 429
    assert connection.exchange(HEAD, [b"abc"], MOST).status == 200
    assert server.accepted == 2
    assert len(server.received[1]) < 2**28
    connection.close()


def test_what_comes_before_the_answer_is_passed_over():
    server = Scripted([takes(WHOLE), says(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)])
    connection = server.connection()
    assert connection.exchange(HEAD, [b"abc"], MOST).status == 200
    connection.close()


def test_a_connection_that_the_server_ends_is_opened_anew():
    closing = OK.replace(b"X-Name: value", b"Connection: close")
    server = Scripted([takes(WHOLE), says(closing)], [takes(WHOLE), says(OK)])
    connection = server.connection()
    for _ in range(2):
        assert connection.exchange(HEAD, [b"abc"], MOST).status == 200
    assert server.accepted == 2
    connection.close()


def test_a_connection_that_ended_while_idle_is_opened_anew():
    server = Scripted([takes(WHOLE), says(OK)], [takes(WHOLE), says(OK)])
    connection = server.connection()
    connection.exchange(HEAD, [b"abc"], MOST)
    # Until the end of the first connection has arrived.
    assert select.select([connection._connection._descriptor], (), (), 5.0)[0]
    assert connection.exchange(HEAD, [b"abc"], MOST).status == 200
    assert server.accepted == 2
    connection.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([takes(WHOLE)], ConnectionFailedError),
        ([takes(WHOLE), says(OK[:-1])], ConnectionFailedError),
        ([takes(WHOLE), says(b"SSH-2.0-OpenSSH\r\n\r\n")], UnexpectedAnswerError),
        ([takes(WHOLE), says(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2**16)], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b" 200", b" 101"))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b" 200", b" 2000"))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b" 200", b" 099"))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b": 5", b": " + b"9" * 5000))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b"X-Name: value", b"Content-Length: 6"))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b"X-Name", b"Transfer-Encoding"))], UnexpectedAnswerError),
        ([takes(WHOLE), says(OK.replace(b"X-Name: value", b"Content-Encoding: gzip"))], UnexpectedAnswerError),
    ],
)
def test_what_is_no_answer_is_an_error(script, error):
    connection = Scripted(script).connection()
    with pytest.raises(error):
        connection.exchange(HEAD, [b"abc"], MOST)


def test_silence_is_an_error_after_some_time():
    connection = Scripted([takes(WHOLE), ends]).connection(timeout_s=0.1)
    with pytest.raises(RequestTimeoutError, match=r"0\.1 s"):
        connection.exchange(HEAD, [b"abc"], MOST)


def head_of(*headers, status=b"200 OK"):
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", b""])


def drips(piece):
    def step(connected, _received):
        with suppress(OSError):
            while True:
                connected.sendall(piece)
                time.sleep(0.01)

    return step


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"", head_of(status=b"100 Continue")),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (head_of(b"Content-Length: 60000"), b"x"),
        (head_of(b"Content-Length: 60000", status=b"503 Busy"), b"x"),
    ],
    ids=["informational", "header", "body", "error"],
)
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for_longer(beginning, piece):
    connection = Scripted([takes(WHOLE), says(beginning), drips(piece)]).connection(timeout_s=0.15)
    began = time.monotonic()
    with pytest.raises(RequestTimeoutError, match=r"0\.15 s"):
        connection.exchange(HEAD, [b"abc"], MOST)
    assert time.monotonic() - began < 5


def test_a_server_that_takes_little_of_a_request_is_not_waited_for_longer():
    def sips(connected, _received):
        with suppress(OSError):
            while connected.recv(2**12):
                time.sleep(0.01)

    connection = Scripted([sips]).connection(timeout_s=0.15)
    with pytest.raises(RequestTimeoutError):
        connection.exchange(HEAD, [bytes(2**26)], MOST)


def test_tls_keeps_the_deadline(raw_server, monkeypatch):
    authority = trustme.CA()
    there, here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(there)
    authority.configure_trust(here)
    monkeypatch.setattr("normload.clients.http_connection._TRUST", TlsSettings(here))
    slow = [head_of(b"Content-Length: 60000"), lambda connected: server.drip()(connected)]
    server = raw_server([OK], slow, tls=there)
    connection = HttpLoadConnection(ServerAddress.parse_url(server.url), 5.0)
    assert bytes(connection.exchange(HEAD, [b"abc"], MOST).body) == b"hello"
    connection.close()
    connection = HttpLoadConnection(ServerAddress.parse_url(server.url), 0.3)
    began = time.monotonic()
    for body in (b"abc", bytes(2**24)):
        with pytest.raises(RequestTimeoutError):
            connection.exchange(HEAD, [body], MOST)
    assert time.monotonic() - began < 5


def test_an_answer_has_no_more_bytes_than_were_asked_for():
    right = head_of(b"Content-Length: 5") + b"hello"
    connection = Scripted([takes(WHOLE), says(right)], [takes(WHOLE), says(right)]).connection()
    assert bytes(connection.exchange(HEAD, [b"abc"], 5).body) == b"hello"
    connection.close()
    with pytest.raises(UnexpectedAnswerError, match="at most 4 bytes, 5 are announced"):
        connection.exchange(HEAD, [b"abc"], 4)


@pytest.mark.parametrize("header", [b"Content-Length: 3000000000", b"Content-Length: 9\r\nContent-Encoding: gzip"])
def test_an_error_is_one_whatever_its_text(header):
    scripts = [[takes(WHOLE), says(head_of(header, status=b"503 Busy"), b"x" * 9)], [takes(WHOLE), says(OK)]]
    server = Scripted(*scripts)
    connection = server.connection()
    answer = connection.exchange(HEAD, [b"abc"], MOST)
    assert (answer.status, bytes(answer.body)) == (503, b"")
    assert connection.exchange(HEAD, [b"abc"], MOST).status == 200
    assert server.accepted == 2
    connection.close()


@pytest.mark.parametrize("connection", [b"close", b"Close, X"])
def test_http_1_0_and_close_end_the_connection(connection):
    answers = [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        head_of(b"Connection: " + connection, b"Content-Length: 0"),
    ]
    server = Scripted(*([takes(WHOLE), says(answer)] for answer in [*answers, OK]))
    sender = server.connection()
    for _ in range(3):
        assert sender.exchange(HEAD, [b"abc"], MOST).status == 200
    assert server.accepted == 3
    sender.close()


def test_a_name_that_cannot_be_looked_up_is_an_error():
    for host in ("a" * 300, "no.such.host.invalid"):
        with pytest.raises(ConnectionFailedError):
            HttpLoadConnection(ServerAddress(host, 1), 1.0).exchange(HEAD, [], MOST)


LINES = st.sampled_from(
    [
        *[b"HTTP/1.1 200 OK", b"Content-Length: 5"] * 5,
        b"HTTP/1.1 103 Early Hints",
        b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 000 \xff",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 503 Busy",
        b"HTTP/1.1 204 No Content",
        b"HTTP/1.1",
        b"Content-Length: " + b"9" * 5000,
        b"Content-Length: -5",
        b"Content-Length: \xb2",
        b"Content-Length: 6",
        b"Content-Encoding: gzip",
        b"Transfer-Encoding: chunked",
        b"Server-Timing: kernel;dur=nan, x;dur=soon",
        b"X-Batch-Size: many",
        b"\x00\xff",
        b"",
        b"",
        b"hello",
    ]
)


@given(st.lists(LINES, max_size=8), st.sampled_from([b"", b"\r\n\r\n", b"\r\n\r\nhello"]))
def test_any_bytes_are_an_answer_or_an_error_of_the_client(lines, end):
    connection = Scripted([takes(WHOLE), says(b"\r\n".join(lines) + end)]).connection()
    with suppress(ClientError):
        answer = connection.exchange(HEAD, [b"abc"], 5)
        assert len(answer.body) <= 5 or answer.status >= 400
        answer.read_timing()
    connection.close()


def test_nobody_there_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailedError):
        HttpLoadConnection(ServerAddress("127.0.0.1", port), 1.0).exchange(HEAD, [b"abc"], MOST)
