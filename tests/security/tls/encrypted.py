"""Servers that speak TLS, and what tests say to them."""

import contextlib
import re
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from tests.certificates import Certificates
from tests.integration.harness.raw import Answer, head
from tests.integration.harness.wire import X, assert_alive, npy

BODY = npy(X)
WHOLE = head("/v1/layer_norm", f"Content-Length: {len(BODY)}") + BODY
RECEIVING = str(Path(__file__).with_name("receiving_server.py"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def uds(tmp_path_factory):
    return tmp_path_factory.mktemp("uds") / "a.sock"


@pytest.fixture(scope="module")
def secure(launched, ours, uds):
    """One that says how bodies arrive, and listens on a Unix socket too."""
    server = launched(*ours.options(), "--uds", str(uds), script=RECEIVING)
    yield server
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def mutual(launched, ours):
    server = launched(*ours.options(), "--tls-client-ca", str(ours.ca))
    yield server
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def impatient(launched, ours):
    limits = [f"--{name}-timeout-s=2" for name in ("header", "send", "body")]
    server = launched(*ours.options(), *limits, "--keep-alive-s", "1")
    yield server
    assert "Traceback" not in server.log


def https(server, trust, **options) -> httpx.Client:
    return httpx.Client(base_url=server.url, verify=trust, timeout=60, **options)


@contextlib.contextmanager
def wrapped(server, trust: ssl.SSLContext):
    """A socket after its handshake."""
    plain = socket.create_connection(server.address, timeout=20)
    with plain, trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        yield connection


def received(connection, count: int = 1) -> list[Answer]:
    """So many answers."""
    data, answers = bytearray(), []
    while len(answers) < count:
        piece = connection.recv(2**20)
        assert piece, f"the server closed after {bytes(data[:200])!r}"
        data += piece
        while (end := data.find(b"\r\n\r\n")) >= 0:
            length = int(re.search(rb"content-length: (\d+)", bytes(data[:end]))[1])
            if len(data) < end + 4 + length:
                break
            answers.append(Answer(bytes(data[: end + 4 + length])))
            del data[: end + 4 + length]
    return answers


def ended(connection) -> bool:
    """The server closes, in whatever way, and sends nothing before."""
    try:
        return connection.recv(1) == b""
    except OSError as error:
        return not isinstance(error, TimeoutError)


def assert_serves(server, trust) -> None:
    with https(server, trust) as api:
        assert_alive(api)
