"""TLS of a real server: who gets in, what bodies become, and how connections end."""

import contextlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from normserve.client import Client, ConnectionFailedError

from tests.certificates import Certificates
from tests.integration.raw import Answer, head
from tests.integration.wire import NPY, X, assert_alive, from_npy, npy

BODY = npy(X)
WHOLE = head("/v1/layer_norm", f"Content-Length: {len(BODY)}") + BODY
RECEIVING = str(Path(__file__).with_name("receiving_server.py"))
ROOT = Path(__file__).parents[2]
LARGE = 2**24


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
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost") as api:
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
        "tests.integration.servers.ServerProcess.client", lambda server: https(server, ours.trust())
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


# Files that change


def test_certificates_change_under_load_and_no_request_fails(start_server, tmp_path, until):
    files = Certificates(tmp_path / "files")
    server = start_server(*files.options())
    trust, first = files.trust(), files.serial()
    ending = threading.Event()

    def load(keeps: bool) -> int:
        """Requests on one connection, or a connection for each."""
        done = 0
        limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
        with https(server, trust, limits=limits) as api:
            while not ending.is_set() or not done:
                assert_alive(api)
                done += 1
        return done

    with ThreadPoolExecutor(4) as pool, wrapped(server, trust) as old:
        loads = [pool.submit(load, keeps) for keeps in (True, True, False, False)]
        try:
            for change in range(3):
                files.renew()
                server.process.send_signal(signal.SIGHUP)
                until(lambda count=change + 1: server.log.count("read again") == count)
                with wrapped(server, trust) as new:
                    assert new.getpeercert()["serialNumber"] == files.serial()
            key = files.key.read_bytes()
            last = files.serial()
            files.key.write_text("nothing")
            server.process.send_signal(signal.SIGHUP)
            until(
                lambda: "the TLS files stay as they were read before: tls_key: holds no private key" in server.log
            )
            with wrapped(server, trust) as new:
                assert new.getpeercert()["serialNumber"] == last
            files.key.write_bytes(key)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: server.log.count("read again") == 4)
        finally:
            ending.set()
        assert all(each.result(60) > 0 for each in loads)
        assert old.getpeercert()["serialNumber"] == first
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200


def test_a_fleet_speaks_tls_and_changes_its_certificates(start_server, tmp_path, until):
    files = Certificates(tmp_path / "files")
    uds = tmp_path / "a.sock"
    fleet = start_server("--devices", "cpu,cpu", "--header-timeout-s", "2", "--uds", str(uds), *files.options())
    trust = files.trust()

    def serials() -> set[str]:
        """Of as many connections as reach each process."""
        seen = set()
        for _ in range(4):
            with wrapped(fleet, trust) as connection:
                seen.add(connection.getpeercert()["serialNumber"])
        return seen

    assert fleet.url.startswith("https://")
    with wrapped(fleet, trust) as old, socket.create_connection(fleet.address, timeout=20) as silent:
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200
        assert serials() == {files.serial()}
        files.renew()
        fleet.process.send_signal(signal.SIGHUP)
        until(lambda: fleet.log.count("read again") == 2)
        assert serials() == {files.serial()}
        assert ended(silent)
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200
    with https(fleet, trust) as api:
        assert_alive(api)
        assert all(each["state"] == "ready" for each in api.get("/v1/info").json()["processes"])
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost") as api:
        assert_alive(api)
    assert "Traceback" not in fleet.log
    fleet.terminate()
    assert fleet.wait() == 0


# How it is used


def test_the_line_that_is_printed_works(mutual, ours, tool):
    tool("curl")
    assert mutual.url.startswith("https://")
    (line,) = [line.strip() for line in mutual.lines if line.strip().startswith("curl ")]
    assert "--cacert ca.pem" in line
    assert "--cert client.pem" in line
    shell = ["bash", "-o", "pipefail", "-c", line.replace("curl -s", "curl --fail -s")]
    said = subprocess.run(shell, cwd=ours.folder, capture_output=True, check=True)
    assert b"HTTP/1.1 200" in said.stdout
    assert (ours.folder / "y.npy").read_bytes().startswith(b"\x93NUMPY")


def test_the_page_says_how(secure, ours):
    with https(secure, ours.trust()) as api:
        page = api.get("/").text
    assert page.count(f"curl -s --cacert ca.pem {secure.url}/sample.npy") == 3


def test_the_python_client(mutual, ours, theirs):
    files = (str(ours.client), str(ours.client))
    for verify in (str(ours.ca), ours.trust()):
        for certificate in (str(ours.client), files):
            with Client(mutual.url, verify=verify, certificate=certificate) as client:
                right = torch.nn.functional.layer_norm(torch.from_numpy(X), (12,))
                torch.testing.assert_close(client.layer_norm(torch.from_numpy(X)).y, right)
    with Client(mutual.url, verify=str(theirs.ca)) as client, pytest.raises(ConnectionFailedError, match="VERIFY"):
        client.info()


def test_the_container_knows_whether_it_is_healthy(secure, mutual, uds):
    def asked(server, **more):
        host, port = server.address
        environment = {"NORMSERVE_HOST": host, "NORMSERVE_PORT": str(port), **more}
        command = [sys.executable, str(ROOT / "docker/healthcheck.py")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert asked(secure, NORMSERVE_TLS_CERT="cert.pem").stdout == "ready\n"
    assert asked(secure, NORMSERVE_TLS_CERT="cert.pem", NORMSERVE_UDS=str(uds)).stdout == "ready\n"
    for refused in (asked(secure), asked(mutual, NORMSERVE_TLS_CERT="cert.pem")):
        assert refused.returncode == 1
        assert refused.stderr.startswith("no answer: ")
