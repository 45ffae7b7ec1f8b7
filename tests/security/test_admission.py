"""Clients that take the server's budget and send nothing for it do not keep others out."""

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.harness.raw import Answer, Connection, head
from tests.integration.harness.wire import assert_alive, assert_problem, npy, post

GIB = 2**30
#: Another address than that of the clients under attack.
ATTACKER = "127.0.0.2"
CHUNKED = head("/v1/layer_norm", "Transfer-Encoding: chunked")
MAX_REQUESTS = 256


def announcing(nbytes: int) -> bytes:
    return head("/v1/layer_norm", f"Content-Length: {nbytes}")


class From(Connection):
    """A connection from an address of the test's choice."""

    def __init__(self, source: str, address: tuple[str, int]) -> None:
        socket.socket.__init__(self, socket.AF_INET, socket.SOCK_STREAM)
        self.settimeout(20)
        self.bind((source, 0))
        self.connect(address)


class Metrics:
    """What a server tells, by series."""

    def __init__(self, api) -> None:
        self._api = api

    def __getitem__(self, series: str) -> float:
        lines = self._api.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"normserve_{series} "))

    def nothing_is_held(self) -> bool:
        series = ("inflight_requests", "inflight_bytes", 'slab_bytes{state="used"}')
        return all(self[each] == 0 for each in series)


@contextlib.contextmanager
def lockout(server, source: str) -> Iterator[list[Connection]]:
    """Four sockets that announce 1 GiB each and send a byte now and then, and 256 with silent chunked bodies."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(From(source, server.address)) for _ in range(4 + MAX_REQUESTS)]
        for connection in sockets[:4]:
            connection.sendall(announcing(GIB) + b"x")
        for connection in sockets[4:]:
            connection.sendall(CHUNKED)
        yield sockets


def drip(connections: list[Connection]) -> None:
    """A byte to each that is still there."""
    for connection in connections:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"x")


def answered(connections: list[Connection]) -> list[Answer]:
    """What those were told that have been told something."""
    answers = []
    for connection in connections:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            received = connection.recv(65536)
            answers += [Answer(received)] if received else []
        connection.settimeout(20)
    return answers


def test_another_address_keeps_no_budget_from_a_user(server, api, until):
    """With everything at its default."""
    metrics = Metrics(api)
    before = metrics['revoked_total{reason="share"}']
    with lockout(server, ATTACKER) as sockets:
        until(lambda: metrics["inflight_requests"] == MAX_REQUESTS)
        assert metrics["inflight_bytes"] == 4 * GIB
        for _ in range(5):
            assert_alive(api)
            drip(sockets[:4])
        large = npy(np.ones((768, 1024), np.float32))
        assert api.post("/v1/layer_norm", content=large).status_code == 200
        # Most of them are as they were: nobody wanted their place.
        assert metrics["inflight_requests"] > MAX_REQUESTS / 2
        assert metrics['revoked_total{reason="share"}'] > before
        for answer in answered(sockets):
            assert answer.status_code in (408, 429), answer.text
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
    until(metrics.nothing_is_held)


@pytest.fixture(scope="module")
def strict(launched):
    """Bodies are never too slow for themselves, and soon so for others."""
    return launched("--min-body-bytes-per-s", "0", "--body-grace-s", "1")


def test_what_stalls_gives_way_also_to_its_own_address(strict, until):
    with strict.client() as api, lockout(strict, "127.0.0.1") as sockets:
        metrics = Metrics(api)
        stalled, share = (metrics[f'revoked_total{{reason="{reason}"}}'] for reason in ("stalled", "share"))
        until(lambda: metrics["inflight_requests"] == MAX_REQUESTS)
        until(lambda: post(api).status_code == 200, 5)
        for _ in range(5):
            drip(sockets[:4])
            assert_alive(api)
        assert metrics['revoked_total{reason="stalled"}'] > stalled
        assert metrics['revoked_total{reason="share"}'] == share
        assert any(answer.status_code == 408 for answer in answered(sockets))
    with strict.client() as api:
        until(Metrics(api).nothing_is_held)


def test_a_flood_of_new_ones_gives_way_too(strict, until):
    """Those that are cut off come again, and none of them has had the time to stall."""
    with strict.client() as api, contextlib.ExitStack() as attack:
        for _ in range(3):
            attack.enter_context(lockout(strict, ATTACKER))
            assert_alive(api)
    with strict.client() as api:
        until(Metrics(api).nothing_is_held)


@pytest.fixture(scope="module")
def quick(launched):
    """Soon ends bodies that are too slow."""
    return launched("--body-grace-s", "0.3")


class TestLeastRate:
    @pytest.mark.parametrize("nbytes", [10_000, GIB], ids=str)
    def test_single_bytes_keep_no_body_alive(self, quick, until, nbytes):
        with Connection(quick.address) as connection, quick.client() as api:
            metrics = Metrics(api)
            connection.sendall(announcing(nbytes))

            def is_answered() -> bool:
                drip([connection])
                connection.settimeout(0.02)
                try:
                    return bool(connection.recv(1, socket.MSG_PEEK))
                except TimeoutError:
                    return False

            # On a busy machine it may be over before anybody looks.
            until(lambda: metrics["inflight_bytes"] == nbytes or is_answered())
            until(is_answered, 10)
            # It is still read from for a while, and holds nothing meanwhile.
            assert metrics.nothing_is_held()
            connection.settimeout(20)
            answer = connection.answer()
            assert_problem(answer, 408, "request_timeout")
            assert answer.headers["connection"] == "close"
            drip([connection])
            assert connection.everything() == b""

    def test_nor_does_silence(self, quick, until):
        with Connection(quick.address) as connection, quick.client() as api:
            connection.sendall(CHUNKED)
            assert_problem(connection.answer(), 408, "request_timeout")
            assert Metrics(api).nothing_is_held()


def test_a_connection_that_was_cut_off_holds_nothing(strict, until):
    """It hears of that at once, and whoever comes has its place."""
    with strict.client() as api, contextlib.ExitStack() as stack:
        metrics = Metrics(api)
        silent = [stack.enter_context(From(ATTACKER, strict.address)) for _ in range(MAX_REQUESTS)]
        for connection in silent:
            connection.sendall(announcing(50_000))
        until(lambda: metrics["inflight_requests"] == MAX_REQUESTS)
        users = [stack.enter_context(Connection(strict.address)) for _ in range(5)]
        for connection in users:
            connection.sendall(announcing(50_000))
        until(lambda: len(told := answered(silent)) > 0 and told[0].status_code in (408, 429))
        assert metrics["inflight_requests"] == MAX_REQUESTS
        assert metrics["inflight_bytes"] == 50_000 * MAX_REQUESTS
