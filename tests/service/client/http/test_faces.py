"""httpx's own clients over the sockets: what they do is done."""

import asyncio

import httpx
import pytest
from normserve.client import AsyncSocketTransport, Client, SocketTransport

from tests.service.client.harness.small_call import ANSWER, TOO_LONG_S, X

HELLO = b"HTTP/1.1 200 Fine\r\nContent-Length: 5\r\nX-Name: value\r\n\r\nhello"


@pytest.fixture(params=["blocking", "asynchronous"])
def send(request):
    """Sends requests through either of httpx's clients: a list of the arguments of `request`."""

    def blocking(options, requests):
        with httpx.Client(transport=SocketTransport(), timeout=TOO_LONG_S, **options) as http:
            return [http.request(*each, **more) for *each, more in requests]

    def asynchronous(options, requests):
        async def main():
            async with httpx.AsyncClient(transport=AsyncSocketTransport(), timeout=TOO_LONG_S, **options) as http:
                return [await http.request(*each, **more) for *each, more in requests]

        return asyncio.run(main())

    kinds = {"blocking": blocking, "asynchronous": asynchronous}
    return lambda *requests, **options: kinds[request.param](options, requests)


def next_request(connected):
    """A step that waits for the next request's head."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += connected.recv(2**16) or b"\r\n\r\n"


def test_an_answer_is_httpx_s(send, raw_server):
    server = raw_server([HELLO, next_request, HELLO])
    first, second = send(
        ("POST", f"{server.url}/a?b=c", {"content": b"body", "headers": {"X-Own": "1"}}),
        ("GET", f"{server.url}/d", {}),
    )
    assert (first.status_code, first.reason_phrase, first.text, first.headers["x-name"]) == (
        200,
        "Fine",
        "hello",
        "value",
    )
    assert second.text == "hello"
    assert len(server.heads) == 1
    head = server.heads[0]
    assert head.startswith(b"POST /a?b=c HTTP/1.1\r\n")
    assert b"\r\nX-Own: 1\r\n" in head
    assert head.endswith(b"\r\n\r\nbody")


def test_a_redirection_is_followed_where_httpx_is_told_to(send, raw_server):
    server = raw_server([b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n", next_request, HELLO])
    (answer,) = send(("GET", f"{server.url}/a", {}), follow_redirects=True)
    assert answer.text == "hello"
    assert len(answer.history) == 1


def test_nothing_is_read_of_an_answer_that_has_no_body(send, raw_server):
    server = raw_server([HELLO[:-5], next_request, b"HTTP/1.1 204 No Content\r\n\r\n", next_request, HELLO])
    head, none, hello = send(("HEAD", server.url, {}), ("DELETE", server.url, {}), ("GET", server.url, {}))
    assert (head.content, none.status_code, hello.text) == (b"", 204, "hello")
    assert len(server.heads) == 1


def test_chunks_and_what_lasts_until_the_end_are_read(send, raw_server):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    server = raw_server([chunked, next_request, b"HTTP/1.1 200 OK\r\n\r\nhello"])
    for answer in send(("GET", server.url, {}), ("GET", server.url, {})):
        assert answer.text == "hello"


def test_a_body_of_unknown_length_goes_through_httpx(send, raw_server):
    server = raw_server([HELLO])

    def pieces():
        yield b"a"
        yield b"b"

    async def async_pieces():
        yield b"a"
        yield b"b"

    try:
        (answer,) = send(("POST", server.url, {"content": pieces()}))
    except RuntimeError:
        (answer,) = send(("POST", server.url, {"content": async_pieces()}))
    assert answer.text == "hello"
    assert b"\r\nTransfer-Encoding: chunked\r\n" in server.heads[0]


def test_errors_are_httpx_s(send, raw_server):
    cut, silent = raw_server([HELLO[:-1]]), raw_server([lambda connected: silent.silence(connected)])
    with pytest.raises(httpx.RemoteProtocolError):
        send(("GET", cut.url, {}))
    with pytest.raises(httpx.ReadTimeout):
        send(("GET", silent.url, {"timeout": 0.05}))
    with pytest.raises(httpx.ConnectError):
        send(("GET", "http://127.0.0.1:1/", {}))
    with pytest.raises(httpx.LocalProtocolError):
        send(("GET", cut.url, {"headers": {"X": "a\r\nY: b"}}))
    with pytest.raises(httpx.UnsupportedProtocol):
        send(("GET", "ftp://127.0.0.1/", {}))


def test_an_answer_that_is_not_read_gives_its_connection_back(raw_server):
    server = raw_server([HELLO[:-1], lambda connected: server.silence(connected)], [HELLO])
    with httpx.Client(transport=SocketTransport(max_connections=1), timeout=TOO_LONG_S) as http:
        with http.stream("GET", server.url) as answer:
            assert answer.status_code == 200
        assert http.get(server.url).text == "hello"
    assert len(server.heads) == 2


def test_a_client_takes_the_sockets_themselves(raw_server):
    server = raw_server([ANSWER])
    with Client(server.url, transport=SocketTransport()) as client:
        assert (client.layer_norm(X).y == X).all()
    # httpx would say that it is httpx.
    assert b"\r\nUser-Agent: normserve-client\r\n" in server.heads[0]
