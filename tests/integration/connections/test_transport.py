"""Bodies and responses of every shape over real sockets, and what is left behind afterwards: nothing."""

import contextlib
import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.raw import Answer, Connection, head
from tests.integration.harness.wire import NPY, X, assert_alive, assert_problem, from_npy, npy

LARGE = np.random.default_rng(1).standard_normal((3000, 1024), dtype=np.float32)
BODY = npy(LARGE)
LENGTH = f"Content-Length: {len(BODY)}"


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(scope="module")
def plain(launched):
    """A server of this module's own, so that its slabs are nobody else's."""
    return launched()


@pytest.fixture(scope="module")
def http_of(plain):
    with plain.client() as client:
        yield client


@pytest.fixture(autouse=True)
def slabs_are_home_afterwards(http_of, until):
    yield

    def all_home() -> bool:
        now = samples(http_of)
        names = ('normserve_slab_bytes{state="used"}', "normserve_inflight_requests", "normserve_inflight_bytes")
        return all(now[name] == 0 for name in names)

    until(all_home)
    assert_alive(http_of)


def assert_normalised(answer: Answer, x: np.ndarray = LARGE) -> None:
    assert answer.status_code == 200, answer.text
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x), x.shape[-1:])
    torch.testing.assert_close(torch.from_numpy(from_npy(answer.content)), expected)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(data: bytes, length: int) -> bytes:
    pieces = (data[start : start + length] for start in range(0, len(data), length))
    return b"".join(map(chunk, pieces)) + b"0\r\n\r\n"


def test_large_bodies_over_one_connection(plain):
    with Connection(plain.address) as connection:
        for shift in range(3):
            x = LARGE + shift * LARGE[0]
            connection.sendall(head("/v1/layer_norm", LENGTH) + npy(x))
            assert_normalised(connection.answer(), x)


def test_slabs_are_kept_for_the_next_request(plain, http_of):
    for _ in range(3):
        with Connection(plain.address) as connection:
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY)
            assert_normalised(connection.answer())
    idle = samples(http_of)['normserve_slab_bytes{state="idle"}']
    assert len(BODY) < idle < 5 * len(BODY)


@pytest.mark.parametrize("cut", [1, 20, 60, 200, 16_000, 70_000], ids=str)
def test_request_in_pieces(plain, cut):
    request = head("/v1/layer_norm", LENGTH) + BODY
    with Connection(plain.address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (request[:cut], request[cut : cut + 1], request[cut + 1 : -1], request[-1:]):
            connection.sendall(piece)
            time.sleep(0.01)
        assert_normalised(connection.answer())


@pytest.mark.parametrize("length", [1000, 65_537, len(BODY)], ids=str)
def test_chunked_body_and_a_request_behind_it(plain, length):
    request = head("/v1/layer_norm", "Transfer-Encoding: chunked") + chunked(BODY, length)
    with Connection(plain.address) as connection:
        connection.sendall(request)
        assert_normalised(connection.answer())
        connection.sendall(request)
        assert_normalised(connection.answer())


def test_bytes_of_a_chunked_body_are_admitted_as_they_come(start_server):
    small = start_server("--max-inflight-bytes", "3000000")
    with Connection(small.address) as connection:
        for _ in range(2):
            connection.sendall(head("/v1/layer_norm", "Transfer-Encoding: chunked") + chunked(BODY, 100_000))
            assert_problem(connection.answer(), 429, "overloaded")


def test_large_body_that_waits_for_leave(plain):
    with Connection(plain.address) as connection:
        for _ in range(2):
            connection.sendall(head("/v1/layer_norm", LENGTH, "Expect: 100-continue"))
            assert connection.answer().status_code == 100
            connection.sendall(BODY)
            assert_normalised(connection.answer())


def test_pipelined_large_bodies_are_answered_in_order(plain):
    arrays = [X, LARGE, X, LARGE[::-1].copy()]
    bodies = [npy(x) for x in arrays]
    requests = b"".join(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body for body in bodies)
    with Connection(plain.address) as connection, ThreadPoolExecutor(1) as sender:
        # Nobody takes the last of it before the first answers are read.
        sender.submit(connection.sendall, requests + head("/nope", "Connection: close", "Content-Length: 0"))
        rest = connection.everything()
    for x in arrays:
        answer = Answer(rest)
        assert_normalised(answer, x)
        rest = answer.rest
    assert_problem(Answer(rest), 404)


@pytest.mark.parametrize(("path", "status"), [("/livez", 200), ("/nope", 404), ("/v1/layer_norm", 405)])
def test_large_body_to_a_route_that_takes_none(plain, path, status):
    with Connection(plain.address) as connection:
        for _ in range(2):
            connection.sendall(head(path, LENGTH).replace(b"POST", b"GET") + BODY)
            assert connection.answer().status_code == status


def test_refused_large_body_does_not_come_into_a_slab(plain, http_of):
    with Connection(plain.address) as connection:
        connection.sendall(head("/v1/layer_norm?eps=0", LENGTH) + BODY[: len(BODY) // 2])
        assert_problem(connection.answer(), 422)
        assert samples(http_of)['normserve_slab_bytes{state="used"}'] == 0


def test_malformed_large_body_gives_its_slab_back(http_of, until):
    wrong = b"no tensor" + BODY
    for _ in range(3):
        assert_problem(http_of.post("/v1/layer_norm", content=wrong, headers={"content-type": NPY}), 400)
    assert samples(http_of)['normserve_slab_bytes{state="used"}'] == 0


@pytest.mark.parametrize("received", [0, 10, 100_000, len(BODY) - 1], ids=str)
def test_client_that_leaves_within_its_body(plain, http_of, until, received):
    name = 'normserve_cancelled_total{stage="recv"}'
    before = samples(http_of).get(name, 0)
    with Connection(plain.address) as connection:
        connection.sendall(head("/v1/layer_norm", LENGTH) + BODY[:received])
        until(lambda: samples(http_of)["normserve_inflight_bytes"] == len(BODY))
    until(lambda: samples(http_of).get(name, 0) == before + 1)


def test_idle_connections_hold_no_slab(plain, http_of):
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(Connection(plain.address))
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY)
            assert_normalised(connection.answer())
        assert samples(http_of)['normserve_slab_bytes{state="used"}'] == 0


@pytest.fixture(scope="module")
def strict(launched):
    return launched("--transfer-timeout-s", "0.5")


class TestSlowClients:
    def test_steady_but_slow_body_is_given_up(self, strict, until):
        with Connection(strict.address) as connection, strict.client() as api:
            connection.sendall(head("/v1/layer_norm", LENGTH))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(100):
                    connection.sendall(bytes(1000))
                    time.sleep(0.02)
            assert_problem(connection.answer(), 408, "request_timeout")
            until(lambda: samples(api)['normserve_slab_bytes{state="used"}'] == 0)

    def test_steady_but_slow_reader_is_cut_off(self, strict, until):
        with Connection(strict.address) as connection, strict.client() as api:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY)
            while 'normserve_cancelled_total{stage="send"}' not in samples(api):
                assert connection.recv(1000)
            until(lambda: samples(api)['normserve_slab_bytes{state="used"}'] == 0)

    def test_the_limit_is_that_of_the_whole_response(self, strict, until):
        """Each of the portions in which it leaves takes about half of the limit."""
        with Connection(strict.address) as connection, strict.client() as api:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            before = samples(api).get('normserve_cancelled_total{stage="send"}', 0)
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY)
            came = 0
            with contextlib.suppress(ConnectionResetError):
                while came < len(BODY) and (piece := connection.recv(2**17)):
                    came += len(piece)
                    time.sleep(len(piece) / 2**23)
            until(lambda: samples(api)['normserve_cancelled_total{stage="send"}'] == before + 1)


def test_head_has_no_body(plain):
    connection = http.client.HTTPConnection(*plain.address, timeout=20)
    for _ in range(2):
        connection.request("HEAD", "/sample.npy")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
    connection.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("uds") / "socket"


@pytest.fixture(scope="module")
def both(path, launched):
    """A server on a port and on a Unix domain socket, where one that died has left its own."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    return launched("--uds", str(path))


@pytest.fixture
def through_it(path, both):
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path), verify=False), base_url="http://normserve"
    ) as client:
        yield client


class TestUnixSocket:
    def test_it_serves_what_the_port_serves(self, through_it, both):
        for _ in range(2):
            assert_normalised(through_it.post("/v1/layer_norm", content=BODY))
        with both.client() as over_tcp:
            assert_alive(over_tcp)

    def test_metrics_tell_them_apart(self, through_it):
        through_it.post("/v1/layer_norm", content=BODY)
        assert [line for line in through_it.get("/metrics").text.splitlines() if 'transport="unix"' in line]

    def test_clients_that_leave_are_noticed(self, path, both, through_it, until):
        name = 'normserve_cancelled_total{stage="recv"}'
        before = samples(through_it).get(name, 0)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(head("/v1/layer_norm", LENGTH) + BODY[:1000])
            until(lambda: samples(through_it)["normserve_inflight_bytes"] == len(BODY))
        until(lambda: samples(through_it).get(name, 0) == before + 1)
