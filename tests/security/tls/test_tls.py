"""TLS of a real server: who gets in, what bodies become, and how connections end."""

import contextlib
import re
import socket
import ssl
import subprocess
import threading

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.raw import head
from tests.integration.harness.wire import NPY, assert_alive, from_npy, npy
from tests.security.tls.encrypted import BODY, WHOLE, assert_serves, ended, https, received, wrapped

LARGE = 2**24


# Bodies


@pytest.mark.parametrize("nbytes", [0, 4096, 16_000, 100_000, LARGE])
def test_bodies_are_right_both_ways(secure, ours, nbytes):
    x = np.random.default_rng(nbytes).standard_normal((nbytes // 4096, 1024), dtype=np.float32)
    with https(secure, ours.trust()) as api:
        for _ in range(2):
            answer = api.post("/v1/layer_norm", content=npy(x), headers={"content-type": NPY})
            assert answer.status_code == 200
            right = torch.nn.functional.layer_norm(torch.from_numpy(x), (1024,))
            torch.testing.assert_close(torch.from_numpy(from_npy(answer.content)), right)


def test_a_large_body_lies_where_it_was_received(secure, ours, until):
    """In its memory at once; no more of it is copied than came along with its header."""
    body = npy(np.ones((LARGE // 4096, 1024), np.float32))
    before = len(secure.lines)
    with https(secure, ours.trust()) as api:
        assert api.post("/v1/layer_norm", content=body, headers={"content-type": NPY}).status_code == 200

    def told(what):
        return sum(int(n) for n in re.findall(rf"^{what} (\d+)$", "".join(secure.lines[before:]), re.M))

    until(lambda: told("placed") + told("copied") == len(body))
    assert told("copied") <= 16 * 1024


def test_chunked_bodies_and_expectations(secure, ours):
    with https(secure, ours.trust()) as api:
        halves = iter((BODY[:50], BODY[50:]))
        assert api.post("/v1/layer_norm", content=halves, headers={"content-type": NPY}).status_code == 200
    asking = head("/v1/layer_norm", f"Content-Length: {len(BODY)}", "Expect: 100-continue")
    with wrapped(secure, ours.trust()) as connection:
        connection.sendall(asking)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert received(connection)[0].status_code == 200


def test_pipelined_requests_are_answered_in_order(secure, ours):
    missing = b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with wrapped(secure, ours.trust()) as connection:
        connection.sendall((WHOLE + missing) * 5)
        assert [answer.status_code for answer in received(connection, 10)] == [200, 404] * 5


def test_a_request_in_many_small_records(secure, ours):
    with wrapped(secure, ours.trust()) as connection:
        for start in range(0, len(WHOLE), 7):
            connection.sendall(WHOLE[start : start + 7])
        assert received(connection)[0].status_code == 200


def test_a_slow_but_steady_reader_gets_everything(impatient, ours):
    """No pause is as long as the limit, and all of it takes several times as long."""
    x = np.ones((LARGE // 4096, 1024), np.float32)
    body = npy(x)
    with wrapped(impatient, ours.trust()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}", "Connection: close") + body)
        came, pause = 0, threading.Event()
        while piece := connection.recv(2**14):
            if came // 2**18 != (came + len(piece)) // 2**18:
                pause.wait(0.05)
            came += len(piece)
    assert came > len(body)


# Who gets in


def test_who_does_not_trust_the_authority_leaves(secure, ours, theirs):
    with https(secure, theirs.trust()) as api, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        api.get("/livez")
    assert_serves(secure, ours.trust())


def test_only_who_has_a_certificate_of_the_authority_is_served(mutual, ours, theirs):
    for client in (None, theirs.client):
        with https(mutual, ours.trust(client=client)) as api, pytest.raises(httpx.TransportError):
            api.post("/v1/layer_norm", content=BODY)
    assert_serves(mutual, ours.trust(client=ours.client))


def test_plain_http_on_the_port_of_tls_gets_nothing(secure, ours):
    with socket.create_connection(secure.address, timeout=20) as connection:
        connection.sendall(WHOLE)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1000):
                assert b"HTTP" not in piece
    assert_serves(secure, ours.trust())


def test_tls_on_a_plain_port_is_refused(server, api, ours):
    with pytest.raises(ssl.SSLError), wrapped(server, ours.trust()):
        pass
    assert_alive(api)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 5000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 600,
        b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
        b"\x80\x2e\x01\x03\x01",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x10" + bytes(16),
    ],
    ids=["nuls", "hello-of-ones", "record-too-long", "ssl2", "alert", "data-first"],
)
def test_garbage_in_place_of_a_handshake(secure, ours, garbage):
    with socket.create_connection(secure.address, timeout=20) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while connection.recv(1000):
                pass
    assert_serves(secure, ours.trust())


def test_garbage_after_the_handshake_ends_the_connection(secure, ours, until):
    with socket.create_connection(secure.address, timeout=20) as plain:
        inside, outside = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = ours.trust().wrap_bio(inside, outside, server_hostname="localhost")
        while True:
            try:
                end.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outside.read())
                inside.write(plain.recv(65536))
        end.write(head("/v1/layer_norm", "Content-Length: 100000"))
        plain.sendall(outside.read() + b"\x17\x03\x03\x00\x20" + b"x" * 32)
        with contextlib.suppress(OSError):
            while plain.recv(65536):
                pass
    assert_serves(secure, ours.trust())


def test_renegotiation_is_declined(secure, ours, tool):
    command = [tool("openssl"), "s_client", "-connect", "{}:{}".format(*secure.address), "-tls1_2"]
    said = subprocess.run(command, input=b"R\n", capture_output=True, timeout=30, check=False)
    assert b"RENEGOTIATING" in said.stdout + said.stderr
    assert b"no renegotiation" in said.stdout + said.stderr
    assert_serves(secure, ours.trust())


@pytest.mark.parametrize("opening", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_who_does_not_finish_a_handshake_is_left(impatient, opening):
    with socket.create_connection(impatient.address, timeout=20) as connection:
        connection.sendall(opening)
        assert ended(connection)


def test_the_unix_socket_stays_plain(secure, uds):
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds), verify=False), base_url="http://localhost"
    ) as api:
        assert_alive(api)


# How connections end


def test_an_idle_connection_is_ended(impatient, ours):
    with wrapped(impatient, ours.trust()) as connection:
        connection.sendall(WHOLE)
        assert received(connection)[0].status_code == 200
        assert ended(connection)


def test_who_does_not_read_is_left(impatient, ours, until):
    body = npy(np.ones((LARGE // 4096, 1024), np.float32))
    with https(impatient, ours.trust()) as api, wrapped(impatient, ours.trust()) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body)
        until(lambda: "\nnormserve_inflight_requests 1.0\n" in api.get("/metrics").text)
        until(lambda: "\nnormserve_inflight_requests 0.0\n" in api.get("/metrics").text)
        gone = r'normserve_requests_total{op="layer_norm",pass="forward",.*code="499"}'
        assert re.search(gone, api.get("/metrics").text)


def test_who_sends_nothing_more_of_a_body_is_told(impatient, ours):
    with wrapped(impatient, ours.trust()) as connection:
        connection.sendall(head("/v1/layer_norm", "Content-Length: 100000") + b"x" * 1000)
        assert received(connection)[0].status_code == 408


@pytest.mark.parametrize("politely", [True, False])
def test_who_leaves_within_a_body_leaves_nothing(secure, ours, until, politely):
    """TLS has no half-closed connections: an end of the client's is the end."""
    with https(secure, ours.trust()) as api:
        with wrapped(secure, ours.trust()) as connection:
            connection.sendall(head("/v1/layer_norm", "Content-Length: 100000") + b"x" * 50_000)
            until(lambda: "\nnormserve_inflight_requests 1.0\n" in api.get("/metrics").text)
            if politely:
                with contextlib.suppress(OSError):
                    connection.unwrap()
            else:
                connection.close()
        until(lambda: "\nnormserve_inflight_requests 0.0\n" in api.get("/metrics").text)


def test_what_was_admitted_is_answered_while_the_server_drains(stage_of, ours, monkeypatch):
    """An idle connection, which never answers that TLS ends, holds up nothing."""
    monkeypatch.setattr(
        "tests.integration.harness.servers.ServerProcess.client", lambda server: https(server, ours.trust())
    )
    stage = stage_of(*ours.options())
    with wrapped(stage.server, ours.trust()) as idle:
        idle.sendall(WHOLE)
        assert received(idle)[0].status_code == 200
        running = stage.occupy_device()
        stage.server.terminate()
        stage.until(lambda: "draining" in stage.server.log)
        stage.open_gate()
        assert running.result(30).status_code == 200
        assert stage.server.wait(30) == 0
    assert "exceeded" not in stage.server.log
