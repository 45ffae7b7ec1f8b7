"""Clients that hardly read their responses do not keep others out."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.certificates import Certificates
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import assert_alive, npy, post

READERS = 256
#: Bytes a second.
RATE = 60_000
X = np.ones((64, 1024), np.float32)
BODY = npy(X)
REQUEST = head("/v1/layer_norm", f"Content-Length: {len(BODY)}", "Connection: close") + BODY
CANCELLED = 'normserve_cancelled_total{stage="send"}'


class SmallWindow(Connection):
    """A connection that takes so little at once that the server's system keeps little ready for it."""

    def __init__(self, address: tuple[str, int]) -> None:
        socket.socket.__init__(self, socket.AF_INET, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        self.settimeout(20)
        self.connect(address)


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def nothing_is_held(api) -> bool:
    now = samples(api)
    names = ("normserve_inflight_requests", "normserve_inflight_bytes", 'normserve_slab_bytes{state="used"}')
    return all(now[name] == 0 for name in names)


OPTIONS = ("--min-body-bytes-per-s", str(RATE), "--body-grace-s", "2", "--max-inflight-requests", str(READERS))


@pytest.fixture(scope="module")
def quick(launched):
    """Soon ends responses that are read too slowly."""
    return launched(*OPTIONS)


@contextlib.contextmanager
def dripping(server) -> Iterator[list[SmallWindow]]:
    """Readers that take a little of their response now and then, far below the rate."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(SmallWindow(server.address)) for _ in range(READERS)]
        for reader in readers:
            reader.sendall(REQUEST[:-1])
        # All responses begin now.
        for reader in readers:
            reader.sendall(REQUEST[-1:])
            reader.setblocking(False)

        def drip() -> None:
            while not over.wait(0.2):
                for reader in readers:
                    with contextlib.suppress(BlockingIOError, ConnectionResetError):
                        reader.recv(1024)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield readers
        finally:
            over.set()
            thread.join()


def test_readers_that_drip_keep_nobody_out(quick, until):
    with quick.client() as api:
        before = samples(api).get(CANCELLED, 0)
        with dripping(quick):
            until(lambda: samples(api)["normserve_inflight_requests"] == READERS)
            assert post(api).status_code == 429
            until(lambda: post(api).status_code == 200)
            until(lambda: nothing_is_held(api))
            until(lambda: samples(api)[CANCELLED] == before + READERS)
            assert_alive(api)


def steadily(connection) -> int:
    """Read to the end at several times the rate, and the bytes that came."""
    pause, came = threading.Event(), 0
    while piece := connection.recv(4096):
        came += len(piece)
        pause.wait(len(piece) / (4 * RATE))
    return came


def test_one_that_reads_slowly_but_fast_enough_gets_everything(quick):
    x = np.ones((96, 1024), np.float32)
    body = npy(x)
    with SmallWindow(quick.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}", "Connection: close") + body)
        assert steadily(connection) > x.nbytes


def test_a_drip_over_tls_is_cut_off(launched, tmp_path, until):
    """What has been read shows in steps of 256 KiB there."""
    ours = Certificates(tmp_path)
    server = launched(*ours.options(), "--min-body-bytes-per-s", "500000", "--body-grace-s", "0.5")
    x = np.ones((512, 1024), np.float32)
    body = npy(x)
    request = head("/v1/layer_norm", f"Content-Length: {len(body)}") + body
    plain = SmallWindow(server.address)
    with (
        plain,
        ours.trust().wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        httpx.Client(base_url=server.url, verify=ours.trust(), timeout=60) as api,
    ):
        connection.sendall(request)
        until(lambda: samples(api)["normserve_inflight_requests"] == 1)

        def is_free() -> bool:
            with contextlib.suppress(OSError):
                connection.recv(100)
            return nothing_is_held(api)

        until(is_free)
        assert samples(api)[CANCELLED] == 1
    assert "Traceback" not in server.log
