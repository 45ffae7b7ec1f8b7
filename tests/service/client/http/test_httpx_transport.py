"""The transports that httpx's own clients take."""

import asyncio
import socket
import threading

import httpx
import pytest
from normserve.client import AsyncClient, AsyncSocketTransport, Client, SocketTransport

from tests.service.client.harness.small_call import ANSWER, TOO_LONG_S, X

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture
def path(tmp_path):
    """Of a socket at which one request is answered."""
    path = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            with listener.accept()[0] as connected:
                connected.recv(2**16)
                connected.sendall(HELLO)

        server = threading.Thread(target=serve)
        server.start()
        yield path
        server.join(TOO_LONG_S)


def test_a_client_of_httpx_reaches_a_unix_socket(path):
    with httpx.Client(transport=SocketTransport(uds=path), timeout=TOO_LONG_S) as http:
        assert http.get("http://localhost/").text == "hello"


def test_an_asynchronous_client_of_httpx_reaches_a_unix_socket(path):
    async def get():
        async with httpx.AsyncClient(transport=AsyncSocketTransport(uds=path), timeout=TOO_LONG_S) as http:
            return (await http.get("http://localhost/")).text

    assert asyncio.run(get()) == "hello"


def test_the_clients_take_these_transports_as_any_of_httpx(raw_server):
    with Client(raw_server([ANSWER]).url, transport=SocketTransport(max_connections=1)) as client:
        assert (client.layer_norm(X).y == X).all()

    async def call(url):
        async with AsyncClient(url, transport=AsyncSocketTransport(max_connections=1)) as client:
            return (await client.layer_norm(X)).y

    assert (asyncio.run(call(raw_server([ANSWER]).url)) == X).all()


def test_a_url_of_a_socket_takes_none_of_them():
    with pytest.raises(ValueError, match="takes no transport"):
        Client("http+unix:///run/x", transport=SocketTransport())
