"""What a client takes of an answer follows from what it asked for, and a call ends when its time is over."""

import asyncio
import socket
import ssl
import threading
import time

import httpx
import numpy as np
import pytest
import trustme
from normserve import client as api
from normserve.client.reception import DOCUMENT_BYTES, LIST_BYTES

from .fake_server import HEADERS, FakeServer, problem_answer, tensors_answer

X = np.arange(6, dtype=np.float32).reshape(2, 3)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-safetensors\r\n"
RIGHT = tensors_answer(y=X).content
ANSWER = OK + b"Content-Length: %d\r\n\r\n" % len(RIGHT) + RIGHT

#: Far more than any call here is given, far less than a test may take.
TOO_LONG_S = 10.0


def normalise(client):
    return client.layer_norm(X)


def either(use, use_async):
    """What to do with a client of either kind."""
    return lambda client: (use_async if isinstance(client, api.AsyncClient) else use)(client)


def chunked(piece):
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def test_an_answer_over_a_real_connection_is_read(ask, raw_server):
    assert (ask(raw_server([ANSWER]).url, normalise).y == X).all()


# Bounds


def test_a_length_beyond_what_was_asked_for_is_refused_before_a_byte_of_it(ask, raw_server):
    server = raw_server([OK + b"Content-Length: 3000000000\r\n\r\n", lambda connected: server.silence(connected)])
    with pytest.raises(api.UnexpectedAnswerError, match=r"at most \d+ bytes, 3000000000 are announced"):
        ask(server.url, normalise, timeout_s=TOO_LONG_S)


@pytest.mark.parametrize(
    ("head", "piece"),
    [(OK + b"\r\n", b"x" * 2**16), (OK + b"Transfer-Encoding: chunked\r\n\r\n", chunked(b"x" * 2**16))],
    ids=["until-close", "chunked"],
)
def test_a_body_without_end_is_left_at_its_bound(ask, raw_server, head, piece):
    server = raw_server([head, lambda connected: server.flood(piece)(connected)])
    with pytest.raises(api.UnexpectedAnswerError, match="at most 65568 bytes, more came"):
        ask(server.url, normalise, timeout_s=TOO_LONG_S)
    # The bound, and what the kernel's buffers took.
    assert server.taken < 2**25


def test_the_bound_is_exact(ask):
    # The longest header that the codec reads, spaces at its end, and not a byte more than x's shape asks for.
    header = RIGHT[8:-24].rstrip()
    longest = (2**16).to_bytes(8, "little") + header.ljust(2**16) + RIGHT[-24:]
    answers = [httpx.Response(200, headers=HEADERS, content=longest + more) for more in (b"", b"0")]
    assert (ask(FakeServer(answers[0]), normalise).y == X).all()
    with pytest.raises(api.UnexpectedAnswerError, match=f"at most {len(longest)} bytes"):
        ask(FakeServer(answers[1]), normalise)


@pytest.mark.parametrize(
    ("use", "most"),
    [
        (lambda client: client.info(), DOCUMENT_BYTES),
        (lambda client: client.layer("a"), DOCUMENT_BYTES),
        (lambda client: client.put_layer("a", "rms_norm", X[0]), DOCUMENT_BYTES),
        (lambda client: client.delete_layer("a"), DOCUMENT_BYTES),
        (lambda client: client.layers(), LIST_BYTES),
    ],
    ids=["info", "layer", "put_layer", "delete_layer", "layers"],
)
def test_descriptions_are_bounded_too(ask, use, most):
    server = FakeServer(httpx.Response(200, headers={"content-length": str(most + 1)}, content=b""))
    with pytest.raises(api.UnexpectedAnswerError, match=f"at most {most} bytes"):
        ask(server, use)


def test_an_error_whose_text_is_too_long_is_still_that_error(ask, raw_server):
    head = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\n\r\n"
    server = raw_server([head, lambda connected: server.flood()(connected)])
    with pytest.raises(api.UnavailableError) as caught:
        ask(server.url, normalise, timeout_s=TOO_LONG_S)
    assert caught.value.retry_after_s == 3
    assert server.taken < 2**25
    announced = httpx.Response(422, headers={"content-length": "2000000"}, content=b'{"code": "invalid_shape"}')
    with pytest.raises(api.InvalidRequestError) as refused:
        ask(FakeServer(announced), normalise)
    assert refused.value.code == ""


def test_a_problem_document_may_be_longer_than_the_answer_that_was_asked_for(ask):
    document = {"code": "invalid_shape", "detail": "d", "more": "x" * 200_000}
    with pytest.raises(api.InvalidRequestError) as caught:
        ask(FakeServer(httpx.Response(422, json=document)), normalise)
    assert caught.value.code == "invalid_shape"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "GZIP", "identity, gzip", "nonsense"])
def test_a_compressed_answer_is_refused_as_it_is(ask, encoding):
    headers = HEADERS | {"content-encoding": encoding}
    answer = httpx.Response(200, headers=headers, stream=httpx.ByteStream(RIGHT))
    with pytest.raises(api.UnexpectedAnswerError, match="must not be compressed"):
        ask(FakeServer(answer), normalise)
    error = httpx.Response(429, headers={"content-encoding": encoding}, stream=httpx.ByteStream(b"{}"))
    with pytest.raises(api.OverloadedError):
        ask(FakeServer(error), normalise)


def test_identity_is_no_compression(ask):
    answer = httpx.Response(200, headers=HEADERS | {"content-encoding": "Identity"}, content=RIGHT)
    assert (ask(FakeServer(answer), normalise).y == X).all()


def test_the_connection_is_dropped_after_an_answer_that_was_refused(ask, raw_server):
    server = raw_server([OK + b"Content-Length: 99999999\r\n\r\n"], [ANSWER])

    def use(client):
        with pytest.raises(api.UnexpectedAnswerError):
            client.layer_norm(X)
        return client.layer_norm(X)

    async def use_async(client):
        with pytest.raises(api.UnexpectedAnswerError):
            await client.layer_norm(X)
        return await client.layer_norm(X)

    assert (ask(server.url, either(use, use_async), max_connections=1).y == X).all()
    assert len(server.heads) == 2


# Deadlines


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
    assert len(server.heads) == 1


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
    # The time of the first attempt is over, so the second call gets a connection of its own.

    def use(client):
        with pytest.raises(api.RequestTimeoutError):
            client.layer_norm(X)
        return client.layer_norm(X)

    async def use_async(client):
        with pytest.raises(api.RequestTimeoutError):
            await client.layer_norm(X)
        return await client.layer_norm(X)

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
    with api.Client(server.url, transport=httpx.HTTPTransport(verify=here), timeout_s=5.0) as client:
        assert (normalise(client).y == X).all()
    began = time.monotonic()
    with (
        api.Client(server.url, transport=httpx.HTTPTransport(verify=here), timeout_s=0.3) as client,
        pytest.raises(api.RequestTimeoutError),
    ):
        client.layer_norm(x)

    async def call():
        transport = httpx.AsyncHTTPTransport(verify=here)
        async with api.AsyncClient(server.url, transport=transport, timeout_s=0.3) as client:
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
