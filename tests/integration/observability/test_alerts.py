"""Alerts that fire because of what they are for: Debian's Prometheus evaluates the rules on servers in trouble.

Windows of minutes are seconds here, and no rule waits.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.harness.servers import ServerProcess
from tests.integration.harness.wire import npy, post
from tests.integration.observability.prometheus import Prometheus

FIRING = 'ALERTS{{alertname="{}",alertstate="firing"}}'
# More than 64 MB in and out.
LARGE = npy(np.ones((2100, 4096), np.float32))


@pytest.fixture
def watch(tool, tmp_path):
    """Have Prometheus watch servers."""
    with contextlib.ExitStack() as stack:

        def start(*servers: ServerProcess) -> Prometheus:
            targets = ["{}:{}".format(*each.address) for each in servers]
            prometheus = Prometheus(tool("prometheus"), tmp_path, targets, is_hurried=True)
            stack.callback(prometheus.stop)
            prometheus.wait_for_scrapes()
            return prometheus

        yield start


def fired(prometheus: Prometheus, alert: str, *labels: str) -> set[tuple[str, ...]]:
    """The values of labels with which an alert fires."""
    return set(prometheus.values(FIRING.format(alert), *labels))


def test_no_target_at_all(watch, until):
    prometheus = watch()
    until(lambda: fired(prometheus, "NormserveAbsent", "job") == {("normserve",)})


def test_connections_that_are_refused(watch, until, launched, tmp_path):
    path = tmp_path / "local"
    server = launched("--local", str(path), "--local-connections", "1", wait=False)
    server.wait_until_ready()
    prometheus = watch(server)
    assert not fired(prometheus, "NormserveRefusingConnections")

    def is_refused_and_fires() -> bool:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(path))
        return fired(prometheus, "NormserveRefusingConnections", "reason") == {("local_connections",)}

    until(is_refused_and_fires)


def test_a_front_end_that_ends_again_and_again(watch, until, launched):
    server = launched("--frontends", "2", wait=False)
    server.wait_until_ready()
    prometheus = watch(server)

    def find_first() -> int | None:
        with contextlib.suppress(Exception), server.client() as api:
            front_ends = api.get("/v1/info").json()["front_ends"]
            return next((each["pid"] for each in front_ends if each["index"] == 0), None)
        return None

    ended: set[int | None] = {None}
    for _ in range(3):
        until(lambda: find_first() not in ended)
        pid = find_first()
        assert pid is not None
        ended.add(pid)
        os.kill(pid, signal.SIGKILL)
    until(lambda: fired(prometheus, "NormserveChildRestarting", "child") == {("front end 0",)})
    # A link whose process has not introduced itself was one.
    seen = prometheus.values("count_over_time(normserve_frontend_open_fds[5m])", "frontend")
    assert set(seen) == {("0",), ("1",)}


@contextlib.contextmanager
def interrupted(pid: int) -> Iterator[None]:
    """A process that gets the processor for a tenth of the time."""
    ending = threading.Event()

    def interrupt() -> None:
        while not ending.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.045)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def test_kernels_far_below_the_peak(watch, until, launched):
    server = launched(wait=False)
    server.wait_until_ready()
    prometheus = watch(server)
    with interrupted(server.owner), server.client() as api:

        def is_slow_and_fires() -> bool:
            assert post(api, content=LARGE).status_code == 200
            found = fired(prometheus, "NormserveKernelsSlow", "op", "pass")
            return found == {("layer_norm", "forward")}

        until(is_slow_and_fires)
