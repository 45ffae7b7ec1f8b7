"""A call ends when its time is over, whatever the server does."""

import asyncio
import socket
import ssl
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest
import trustme
from normserve import client as api

from tests.service.client.harness.small_call import ANSWER, OK, TOO_LONG_S, X, either, normalise

from .harness.fake_server import HEADERS, FakeServer, problem_answer

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"", None),
        (OK, None),
        (OK + b"X: ", b"x"),
        (CONTINUE, CONTINUE),
        (OK + b"Content-Length: 60000\r\n\r\n", b"x"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 60000\r\n\r\n", b"x"),
    ],
    ids=["nothing", "head", "header", "informational", "body", "chunks", "error"],
)
def test_a_call_ends_when_its_time_is_over(ask, raw_server, beginning, piece):
    server = raw_server([beginning, lambda connected: (server.drip(piece) if piece else server.silence)(connected)])
    began = time.monotonic()
    with pytest.raises(api.RequestTimeoutError, match=r"within 0\.15 s"):
        ask(server.url, normalise, tries=5, timeout_s=0.15)
    assert 0.1 < time.monotonic() - began < TOO_LONG_S
    # Not asked again; on a busy machine the server may not have read what it was asked.
    assert len(server.heads) <= 1


def test_a_transport_of_another_make_is_left_at_the_next_piece():
    class Dripping(httpx.SyncByteStream):
        def __iter__(self):
            while True:
                time.sleep(0.01)
                yield b"x"

    began = time.monotonic()
    answer = httpx.Response(200, headers=HEADERS, stream=Dripping())
    with (
        api.Client(transport=httpx.MockTransport(lambda _: answer), timeout_s=0.1) as client,
        pytest.raises(api.RequestTimeoutError),
    ):
        normalise(client)
    assert time.monotonic() - began < TOO_LONG_S


def test_informational_answers_without_end_are_a_timeout(ask, raw_server):
    server = raw_server([lambda connected: server.flood(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)(connected)])
    with pytest.raises(api.RequestTimeoutError):
        ask(server.url, normalise, timeout_s=0.15)


def test_a_server_that_takes_little_of_a_request_is_a_timeout(ask, raw_server):
    def sips(connected):
        while not server.closing.wait(0.01):
            connected.recv(2**14)

    server = raw_server([sips])
    with pytest.raises(api.RequestTimeoutError):
        ask(server.url, lambda client: client.layer_norm(np.zeros((2**11, 2**12), np.float32)), timeout_s=0.2)


def test_attempts_and_pauses_share_the_time(ask):
    busy = problem_answer(429, "overloaded")
    began = time.monotonic()
    with pytest.raises((api.OverloadedError, api.RequestTimeoutError)):
        ask(FakeServer(busy), normalise, tries=10**6, timeout_s=0.1)
    with pytest.raises(api.OverloadedError):
        ask(
            FakeServer(problem_answer(429, "overloaded", **{"retry-after": "20"})), normalise, tries=5, timeout_s=10
        )
    assert time.monotonic() - began < TOO_LONG_S


def test_who_waits_for_a_connection_has_no_more_time_either(raw_server):
    server = raw_server([lambda connected: server.silence(connected)])
    with api.Client(server.url, timeout_s=0.2, max_connections=1) as client:
        errors = []

        def call():
            try:
                normalise(client)
            except api.RequestTimeoutError as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TOO_LONG_S)
        assert len(errors) == 3


def test_a_client_goes_on_after_a_timeout(ask, raw_server):
    server = raw_server([lambda connected: server.silence(connected)], [ANSWER])
    # The time of the first call is over, so the next one gets a connection of its own.  On a busy machine that one,
    # too, may take too long.

    def use(client):
        with pytest.raises(api.RequestTimeoutError):
            client.layer_norm(X)
        for _ in range(20):
            with suppress(api.RequestTimeoutError):
                return client.layer_norm(X)
        raise AssertionError("each call takes too long")

    async def use_async(client):
        with pytest.raises(api.RequestTimeoutError):
            await client.layer_norm(X)
        for _ in range(20):
            with suppress(api.RequestTimeoutError):
                return await client.layer_norm(X)
        raise AssertionError("each call takes too long")

    assert (ask(server.url, either(use, use_async), timeout_s=0.3, max_connections=1).y == X).all()


def test_a_unix_sockets_calls_end_in_time_as_well(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with (
            api.Client(transport=httpx.HTTPTransport(uds=path), timeout_s=0.1) as client,
            pytest.raises(api.RequestTimeoutError),
        ):
            client.info()


@pytest.mark.parametrize("drips", [True, False], ids=["dripping", "sipping"])
def test_tls_keeps_the_deadline(raw_server, drips):
    authority = trustme.CA()
    there, here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(there)
    authority.configure_trust(here)

    def sips(connected):
        while not server.closing.wait(0.01):
            connected.recv(2**10)

    # The first call finds that all is well but for the pace.
    slow = [OK + b"Content-Length: 60000\r\n\r\n", lambda connected: server.drip()(connected)] if drips else [sips]
    server = raw_server([ANSWER], slow, tls=there)
    x = X if drips else np.zeros((2**11, 2**12), np.float32)
    with api.Client(server.url, verify=here, timeout_s=5.0) as client:
        assert (normalise(client).y == X).all()
    began = time.monotonic()
    with (
        api.Client(server.url, verify=here, timeout_s=0.3) as client,
        pytest.raises(api.RequestTimeoutError),
    ):
        client.layer_norm(x)

    async def call():
        async with api.AsyncClient(server.url, verify=here, timeout_s=0.3) as client:
            await client.layer_norm(x)

    with pytest.raises(api.RequestTimeoutError):
        asyncio.run(call())
    assert time.monotonic() - began < TOO_LONG_S


def test_every_address_of_a_host_is_tried(raw_server, monkeypatch):
    server = raw_server([ANSWER])
    port = int(server.url.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [f for f in found if host in ("two", f[4][0])]
    )
    with api.Client(f"http://two:{port}", retries=api.RetryPolicy(tries=1)) as client:
        assert (normalise(client).y == X).all()
    found.clear()
    with (
        api.Client(f"http://two:{port}", retries=api.RetryPolicy(tries=1)) as client,
        pytest.raises(api.ConnectionFailedError),
    ):
        normalise(client)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e300])
def test_what_is_no_time_is_refused(timeout_s):
    for kind in (api.Client, api.AsyncClient):
        with pytest.raises(ValueError, match="timeout_s must be above 0"):
            kind(timeout_s=timeout_s)
