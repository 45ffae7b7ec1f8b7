"""Exchanges with servers that do what HTTP allows, and what it does not; over real connections."""

import contextlib
import socket
import ssl
import threading
import tracemalloc

import httpx
import numpy as np
import pytest
import trustme
from normserve import client as api
from normserve.client.http.message_heads import HEAD_BYTES

from tests.service.client.harness.fake_server import tensors_answer
from tests.service.client.harness.raw_server import gone, next_head
from tests.service.client.harness.small_call import ANSWER, OK, RIGHT, TOO_LONG_S, X, either, normalise, times

REFUSAL = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 21\r\n\r\n" + b'{"code": "too_large"}'
LARGE = np.zeros((4096, 4096), np.float32)


def test_each_result_has_memory_of_its_own(ask, raw_server):
    other = tensors_answer(y=X + 1).content
    server = raw_server([ANSWER, next_head, OK + b"Content-Length: %d\r\n\r\n" % len(other) + other])

    def use(client):
        return client.layer_norm(X).y, client.layer_norm(X).y

    async def use_async(client):
        return (await client.layer_norm(X)).y, (await client.layer_norm(X)).y

    first, second = ask(server.url, either(use, use_async))
    assert (first == X).all()
    assert (second == X + 1).all()


@pytest.mark.parametrize("end", ["closes", "stays", "interim"])
def test_a_refusal_before_the_body_was_read_is_read(ask, raw_server, end):
    steps = {
        "closes": [REFUSAL, gone],
        "stays": [REFUSAL.replace(b"Connection: close\r\n", b""), lambda connected: server.silence(connected)],
        # In one piece: a reset takes back what waits to be sent.
        "interim": [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + REFUSAL, gone],
    }
    server = raw_server(steps[end])
    with pytest.raises(api.TooLargeError):
        ask(server.url, lambda client: client.layer_norm(LARGE), timeout_s=TOO_LONG_S)


def test_tls_is_spoken_and_a_refusal_read_through_it(ask, raw_server):
    authority = trustme.CA()
    there, here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(there)
    authority.configure_trust(here)
    server = raw_server([ANSWER, next_head, ANSWER], tls=there)
    assert (ask(server.url, times(2), verify=here).y == X).all()
    assert len(server.heads) == 1
    server = raw_server([REFUSAL, lambda connected: server.silence(connected)], tls=there)
    with pytest.raises(api.TooLargeError):
        ask(server.url, lambda client: client.layer_norm(LARGE), verify=here, timeout_s=TOO_LONG_S)
    with pytest.raises(api.ConnectionFailedError, match="certificate"):
        ask(server.url, normalise, timeout_s=TOO_LONG_S)


def test_an_interim_answer_does_not_end_the_sending(ask, raw_server):
    def reads_all(connected):
        head = server.heads[-1]
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        left = length - len(head.partition(b"\r\n\r\n")[2])
        while left:
            left -= len(connected.recv(2**16))

    server = raw_server([b"HTTP/1.1 100 Continue\r\n\r\n" * 3, reads_all, ANSWER])
    with pytest.raises(api.UnexpectedAnswerError, match="y must be"):
        ask(server.url, lambda client: client.layer_norm(LARGE), timeout_s=TOO_LONG_S)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ANSWER,
        OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(RIGHT), RIGHT),
        OK + b"\r\n" + RIGHT,
        ANSWER.replace(b"HTTP/1.1", b"HTTP/1.0"),
        ANSWER + b"more than that",
    ],
    ids=["interim", "chunked", "until-close", "1.0", "longer"],
)
def test_answers_may_come_in_many_ways(ask, raw_server, answer):
    for cut in (0, 20, len(answer) - 3):
        server = raw_server([answer[:cut], lambda _: None, answer[cut:]])
        assert (ask(server.url, normalise).y == X).all()


def test_nothing_follows_more_than_was_announced(ask, raw_server):
    server = raw_server([ANSWER + b"HTTP/1.1 200 OK\r\n", next_head, ANSWER], [ANSWER])
    assert (ask(server.url, times(2), tries=1).y == X).all()
    assert len(server.heads) == 2


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER[:-1],
        ANSWER[:40],
        b"",
        OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (len(RIGHT), RIGHT[:9]),
        OK + b"X: " + b"x" * 2**20,
        OK + b"X: y\r\n" * (HEAD_BYTES // 6) + b"\r\n",
    ],
    ids=["body", "head", "nothing", "chunk", "long-header", "many-headers"],
)
def test_what_is_cut_off_or_without_end_is_an_error(ask, raw_server, answer):
    with pytest.raises(api.ConnectionFailedError):
        ask(raw_server([answer]).url, normalise, timeout_s=TOO_LONG_S)


def test_a_head_that_goes_on_while_a_body_is_sent_is_an_error(ask, raw_server):
    server = raw_server([b"HTTP/1.1 1", lambda connected: server.flood()(connected)])
    with pytest.raises(api.ConnectionFailedError):
        ask(server.url, lambda client: client.layer_norm(LARGE), timeout_s=TOO_LONG_S)


def test_a_call_takes_no_memory_but_its_result_s(ask, raw_server):
    large = LARGE[:2048]
    body = tensors_answer(y=large).content

    def takes_it(connected):
        left = large.nbytes
        while left > 2**16:
            left -= len(connected.recv(min(2**16, left)))

    server = raw_server([takes_it, OK + b"Content-Length: %d\r\n\r\n" % len(body), lambda c: c.sendall(body)])

    def measured(client):
        tracemalloc.start()
        return client.layer_norm(large)

    try:
        result = ask(server.url, measured, timeout_s=TOO_LONG_S)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.y == large).all()
    assert peak < 1.1 * large.nbytes


def test_a_socket_in_the_file_system_is_a_server(ask, tmp_path):
    path = tmp_path / "a b.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        heads = []

        def serve():
            connected, _ = listener.accept()
            with connected:
                heads.append(connected.recv(2**16))
                connected.sendall(ANSWER)
                connected.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        assert (ask(f"http+unix://{path}", normalise).y == X).all()
        server.join(TOO_LONG_S)
    assert b"\r\nHost: localhost\r\n" in heads[0]
    with pytest.raises(api.ConnectionFailedError):
        ask(f"http+unix://{path}", normalise)


def test_a_socket_takes_no_transport_that_knows_none():
    with pytest.raises(ValueError, match="takes no transport"):
        api.Client("http+unix:///run/x", transport=httpx.HTTPTransport())


def test_version_6_of_the_protocol_of_addresses(ask):
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no address of version 6")
    with listener:

        def serve():
            connected, _ = listener.accept()
            with connected:
                connected.recv(2**16)
                connected.sendall(ANSWER)
                connected.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        assert (ask(f"http://[::1]:{listener.getsockname()[1]}", normalise).y == X).all()
        server.join(TOO_LONG_S)


def test_a_proxy_of_the_environment_is_asked(ask, raw_server, monkeypatch):
    proxy, server = raw_server([ANSWER]), raw_server([ANSWER])
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (ask("http://far.example", normalise).y == X).all()
    assert proxy.heads[0].startswith(b"POST http://far.example/v1/layer_norm HTTP/1.1\r\n")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert (ask(server.url, normalise).y == X).all()
    assert len(proxy.heads) == 1


def test_a_password_in_the_url_is_sent(ask, raw_server):
    server = raw_server([ANSWER])
    ask(server.url.replace("http://", "http://user:p%40ss@"), normalise, api_key="key")
    assert b"\r\nAuthorization: Basic dXNlcjpwQHNz\r\n" in server.heads[0]
    assert b"Bearer" not in server.heads[0]


def test_nothing_that_a_caller_names_becomes_a_header(ask, raw_server):
    server = raw_server([ANSWER])
    for use in (
        lambda client: client.layer_norm(X, layer="a HTTP/1.1\r\nX-Own: 1"),
        lambda client: client.layer_norm(X, activation="\r\nX-Own: 1\r\n\r\n"),
    ):
        ask(server.url, use)
    for name in ("a\r\nX-Own: 1", "\u00fc/../..", ""):
        with contextlib.suppress(api.ClientError):
            ask(server.url, lambda client, name=name: client.delete_layer(name))
    assert len(server.heads) == 5
    assert not any(b"\r\nX-Own" in head for head in server.heads)
