"""Requests that end elsewhere than they say, or nowhere: none passes the key, hides another, or takes memory."""

import contextlib
import re
import socket
import subprocess

import pytest

from tests.integration.harness.raw import Connection, answered, exchange
from tests.integration.harness.wire import X, assert_problem, npy

KEY = "Authorization: Bearer s3cret"
BODY = npy(X)
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
INSIDE = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n\r\n"


def request(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode("latin-1")


def operation(*lines: str) -> bytes:
    return request("POST", "/v1/layer_norm", *lines)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)]


@pytest.fixture(scope="module")
def locked(launched):
    return launched(env={"NORMSERVE_API_KEY": "s3cret"})


@pytest.fixture(autouse=True)
def serves_afterwards(locked):
    yield
    with Connection(locked.address) as connection:
        connection.sendall(operation(KEY, LENGTH) + BODY)
        assert connection.answer().status_code == 200


ENDLESS = {
    "header": (b"GET /livez HTTP/1.1\r\n", b"X-A: b\r\n", 431),
    "header-value": (b"GET /livez HTTP/1.1\r\nX-A: ", b"a", 431),
    "target": (b"GET /livez?", b"a", 431),
    "empty-lines": (b"", b"\r\n", 431),
    "trailers": (operation(CHUNKED) + b"0\r\n", b"X-A: b\r\n", 431),
    "trailer-value": (operation(CHUNKED) + b"0\r\nX-A: ", b"a", 400),
    "chunk-extension": (operation(CHUNKED) + b"1;", b"a", 400),
    "chunk-size": (operation(CHUNKED), b"0", 400),
    "padded-chunks": (operation(CHUNKED), b"0001;a=0123456789\r\nx\r\n", 400),
}


@pytest.mark.parametrize("line", [b"", KEY.encode() + b"\r\n"], ids=["no-key", "key"])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_cut_off_in_constant_memory(locked, name, line):
    begin, endless, status = ENDLESS[name]
    begin = begin.replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + line)
    before = locked.resident_bytes()
    piece = endless * (65536 // len(endless))
    sent = 0
    with Connection(locked.address) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(begin)
            while sent < 2**25:
                connection.sendall(piece)
                sent += len(piece)
        assert sent < 2**25
        received = b""
        # A reset may overtake the answer.
        with contextlib.suppress(ConnectionResetError):
            received = connection.everything()
    assert set(statuses(received)) <= {status, 401}
    assert locked.resident_bytes() - before < 24 * 2**20


def test_ten_thousand_header_fields_of_one_letter_in_cuts(locked):
    """As CVE-2025-48956: header of any length, and slowly."""
    with Connection(locked.address) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        for _ in range(10_000):
            connection.send(b"a:b\r\n" * 3)
        assert_problem(connection.answer(), 431, "headers_too_large")


@pytest.mark.parametrize("together", [True, False], ids=["one-read", "later"])
def test_key_in_a_trailer_opens_nothing(locked, until, together):
    head, tail = operation(CHUNKED), chunk(BODY) + b"0\r\n" + KEY.encode() + b"\r\n\r\n"
    with Connection(locked.address) as connection:
        if together:
            connection.sendall(head + tail)
            assert_problem(connection.answer(), 401, "unauthorized")
        else:
            connection.sendall(head)
            assert_problem(connection.answer(), 401, "unauthorized")
            connection.sendall(tail)
        connection.sendall(operation(f"Content-Length: {len(BODY)}") + BODY)
        assert_problem(connection.answer(), 401, "unauthorized")


def test_trailers_do_no_harm(locked):
    with Connection(locked.address) as connection:
        connection.sendall(operation(KEY, CHUNKED) + chunk(BODY) + b"0\r\nContent-Length: 5\r\nHost: b\r\n\r\n")
        assert connection.answer().status_code == 200
        connection.sendall(request("GET", "/livez"))
        assert connection.answer().content == b"ok\n"


class TestUpgrade:
    """It is declined, and what follows the header is the body that was announced, and nothing else."""

    @pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
    @pytest.mark.parametrize("together", [True, False], ids=["one-read", "later"])
    def test_body_is_no_request(self, locked, protocol, together):
        lines = ("Connection: Upgrade", f"Upgrade: {protocol}", KEY, f"Content-Length: {len(INSIDE)}")
        with Connection(locked.address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pieces = [operation(*lines), INSIDE]
            for piece in [b"".join(pieces)] if together else pieces:
                connection.sendall(piece)
            assert_problem(connection.answer(), 415, "unsupported_media_type")
            connection.sendall(request("GET", "/livez"))
            answer = connection.answer()
            assert (answer.content, answer.rest) == (b"ok\n", b"")

    @pytest.mark.parametrize("chunked", [True, False])
    def test_body_is_served(self, locked, chunked):
        body = chunk(BODY) + b"0\r\n\r\n" if chunked else BODY
        with Connection(locked.address) as connection:
            for _ in range(2):
                connection.sendall(operation(*UPGRADE, KEY, "Expect: 100-continue", CHUNKED if chunked else LENGTH))
                assert connection.answer().status_code == 100
                connection.sendall(body)
                assert connection.answer().status_code == 200

    def test_curl_that_would_rather_speak_http_2(self, locked, tool, tmp_path):
        curl = tool("curl")
        (tmp_path / "x.npy").write_bytes(BODY)
        told = subprocess.run(
            [
                *(curl, "-s", "-o", "/dev/null", "-w", "%{http_code}", "--http2"),
                *("-H", KEY, "--data-binary", "@x.npy", f"{locked.url}/v1/layer_norm"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout == "200"


SMUGGLED = chunk(BODY) + b"0\r\n\r\n" + INSIDE


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((LENGTH, CHUNKED), 400),
        ((CHUNKED, "Content-Length: 0"), 400),
        ((CHUNKED, CHUNKED), 400),
        (("Transfer-Encoding: chunked, chunked",), 400),
        (("Transfer-Encoding: chunked, identity",), 400),
        (("Transfer-Encoding: gzip",), 400),
        (("Transfer-Encoding: identity",), 400),
        (("Transfer-Encoding: xchunked",), 400),
        (("Transfer-Encoding: \x0bchunked",), 400),
        (('Transfer-Encoding: "chunked"',), 400),
        (("Transfer-Encoding : chunked",), 400),
        ((" Transfer-Encoding: chunked",), 400),
        (("X: a\nTransfer-Encoding: chunked",), 400),
        (("X: a\rTransfer-Encoding: chunked",), 400),
        (("Transfer-Encoding:\r\n chunked",), 400),
        (("Transfer-Encoding: gzip, chunked",), 501),
        (("Transfer-Encoding: chunked;q=1, chunked",), 501),
    ],
)
def test_length_that_two_readers_could_see_differently(locked, lines, status):
    received = exchange(locked.address, operation(KEY, *lines) + SMUGGLED)
    assert_problem(received, status, {400: "malformed_http", 501: "unsupported_transfer_encoding"}[status])
    assert received.headers["connection"] == "close"
    assert received.rest == b""


@pytest.mark.parametrize("value", ["chunked", "Chunked", "CHUNKED ", "\tchunked"])
def test_chunked_in_any_case(locked, value):
    with Connection(locked.address) as connection:
        connection.sendall(operation(KEY, f"Transfer-Encoding:{value}") + chunk(BODY) + b"0\r\n\r\n")
        assert connection.answer().status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "18446744073709551616",
        "99999999999999999999",
        "+5",
        "-5",
        "5, 5",
        "5,5",
        "0x10",
        "1e3",
        "5 5",
        "",
        "5;",
        "\u0665",
    ],
)
def test_lengths_that_are_none(locked, value):
    head = f"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: {value}\r\n\r\n".encode()
    assert_problem(exchange(locked.address, head + BODY), 400, "malformed_http")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**12])
def test_small_body_that_declares_terabytes(locked, length):
    before = locked.resident_bytes()
    answer = answered(locked.address, operation(KEY, f"Content-Length: {length}") + BODY)
    assert_problem(answer, 413, "too_large")
    with Connection(locked.address) as connection:
        connection.sendall(operation(KEY, CHUNKED) + b"%x\r\n" % 10**12 + BODY)
        connection.shutdown(socket.SHUT_WR)
        assert connection.everything() == b""
    assert locked.resident_bytes() - before < 24 * 2**20


def test_tiny_chunks_take_the_memory_of_their_bytes(locked):
    """As CVE-2025-23310 and -23311: an allocation for each chunk."""
    before = locked.resident_bytes()
    with Connection(locked.address) as connection:
        connection.sendall(operation(KEY, CHUNKED))
        connection.sendall(b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n")
        assert_problem(connection.answer(), 415, "unsupported_media_type")
    assert locked.resident_bytes() - before < 24 * 2**20


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nhost: b\r\n\r\n",
        b"GET /livez HTTP/1.0\r\nHost: localhost\r\nHost: b\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/0.9\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.2\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/3.0\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20),
        b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n"
        b"Authorization: Bearer s3cret\r\n\r\n",
        b"POST /v1/layer_norm HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        operation(KEY, LENGTH, "Content-Length: 1") + BODY,
        operation(KEY, LENGTH, LENGTH) + BODY,
        operation(KEY, LENGTH, "X: a\0b") + BODY,
        operation(KEY, LENGTH, "Bad Name: a") + BODY,
        b"GET / HTTP/1.1\nHost: localhost\0\n\n",
        "GET /\u00fc HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        # The beginning of TLS.
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        bytes(100),
    ],
)
def test_requests_that_are_none(locked, sent):
    answer = exchange(locked.address, sent)
    assert_problem(answer, 400, "malformed_http")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("method", ["CONNECT", "UPGRADE", "TRACE", "PURGE", "M-SEARCH", "BREW", "get"])
@pytest.mark.parametrize("target", ["/livez", "http://a/livez"])
def test_strange_methods_have_ordinary_bodies(locked, method, target):
    with Connection(locked.address) as connection:
        connection.sendall(request(method, target, KEY, f"Content-Length: {len(INSIDE)}") + INSIDE)
        answer = connection.answer()
        assert_problem(answer, answer.status_code)
        assert answer.status_code in (400, 405)
        if answer.status_code == 405:
            connection.sendall(request("GET", "/livez"))
            assert connection.answer().content == b"ok\n"
        else:
            assert connection.everything() == b""


@pytest.mark.parametrize(
    "sent",
    [
        operation(KEY, LENGTH) + BODY,
        request("GET", "/livez"),
        request("GET", "/metrics"),
        request("GET", "/"),
        request("GET", "/docs"),
        request("GET", "/nope"),
        request("OPTIONS", "/livez"),
        operation(LENGTH) + BODY,
        b"GARBAGE\r\n\r\n",
        request("GET", "/livez", "X: " + "a" * 70_000),
    ],
)
def test_no_response_is_sniffed(locked, sent):
    with Connection(locked.address) as connection:
        connection.sendall(sent)
        assert connection.answer().headers["x-content-type-options"] == "nosniff"


def test_header_that_drips_is_not_waited_for_longer(start_server):
    impatient = start_server("--header-timeout-s", "0.3")
    with Connection(impatient.address) as connection:
        connection.settimeout(0.05)
        connection.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        received = b""
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                received = connection.recv(65536)
                break
            connection.sendall(b"a")
        assert statuses(received) == [408]
