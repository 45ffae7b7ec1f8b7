"""The API key goes to the server that the client was made for, and into no text."""

import asyncio
import traceback

import httpx
import numpy as np
import pytest
from normserve import client as api

from .harness.fake_server import FakeServer

X = np.zeros((2, 3), np.float32)
KEY = "s3cret-key"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirection_is_an_error_and_nobody_else_is_asked(ask, raw_server, status):
    elsewhere = raw_server([b""])
    head = f"HTTP/1.1 {status} Moved\r\nLocation: {elsewhere.url}/v1/info\r\nContent-Length: 0\r\n\r\n"
    server = raw_server([head.encode()])
    with pytest.raises(api.UnexpectedAnswerError, match=f"redirection, its status is {status}"):
        ask(server.url, lambda client: client.info(), api_key=KEY)
    assert not elsewhere.heads
    assert f"Bearer {KEY}".encode() in server.heads[0]


def test_cookies_are_neither_kept_nor_sent(ask, raw_server):
    server = raw_server([b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"])

    def twice(client):
        client.info()
        client.info()

    async def twice_async(client):
        await client.info()
        await client.info()

    ask(server.url, lambda client: (twice_async if isinstance(client, api.AsyncClient) else twice)(client))
    assert len(server.heads) == 2
    assert b"cookie" not in b"".join(server.heads).lower()


def test_a_client_shows_neither_key_nor_password_nor_address():
    url = f"http://user:{KEY}@127.0.0.1:8000"
    with api.Client(url, api_key=KEY) as client:
        assert repr(client) == f"{client}" == "Client('http://127.0.0.1:8000')"
    other = api.AsyncClient(url, api_key=KEY)
    assert repr(other) == "AsyncClient('http://127.0.0.1:8000')"
    asyncio.run(other.close())


@pytest.mark.parametrize("key", ["", f"{KEY}\n", f" {KEY}", f"{KEY}é", f"{KEY}\r\nX: y", f"{KEY}\0"])
def test_what_cannot_be_a_key_is_refused_and_not_repeated(key):
    for kind in (api.Client, api.AsyncClient):
        with pytest.raises(ValueError, match="API key must be") as caught:
            kind(api_key=key)
        assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b", f"//user:{KEY}@host"]
)
def test_what_is_no_url_is_refused(url):
    for kind in (api.Client, api.AsyncClient):
        with pytest.raises(ValueError, match="the URL must be http://HOST:PORT") as caught:
            kind(url)
        assert KEY not in str(caught.value)


def test_a_server_that_repeats_the_key_does_not_bring_it_into_a_message(ask):
    echo = dict.fromkeys(("code", "detail", "title", "request_id"), f"got Bearer {KEY}")
    for document in (echo, echo | {"code": None}):
        with pytest.raises(api.ApiError) as caught:
            ask(FakeServer(httpx.Response(400, json=document)), lambda client: client.info(), api_key=KEY)
        error = caught.value
        assert "got Bearer [API key]" in str(error)
        assert KEY not in f"{error!r} {error.code} {error.detail} {error.request_id}"


@pytest.mark.parametrize(
    "said",
    [
        f"HTTP/1.1 200 OK\r\nBearer {KEY}\r\n\r\n",
        f"{KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Type: text/{KEY}\r\nContent-Length: 2\r\n\r\n{{}}",
        f"HTTP/1.1 400 Bad Request\r\n\r\n<html>{KEY}",
        f"HTTP/1.1 302 Found\r\nLocation: {KEY}://[\r\n\r\n",
    ],
)
def test_not_even_a_logged_error_repeats_what_the_server_sent(ask, raw_server, said):
    server = raw_server([said.encode()])
    with pytest.raises(api.ClientError) as caught:
        ask(server.url, lambda client: client.layer_norm(X))
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_text_of_a_server_is_short_and_printable(ask):
    document = {"code": "c" * 10**5, "detail": "\x1b[2J\n\u202e" + "d" * 10**5, "request_id": "\x00r" * 500}
    with pytest.raises(api.ApiError) as caught:
        ask(FakeServer(httpx.Response(400, json=document)), lambda client: client.info())
    error = caught.value
    assert str(error).isprintable()
    assert "ddd" in error.detail
    assert (len(error.code), len(error.detail), len(error.request_id)) == (100, 1000, 128)
    assert error.problem == document
