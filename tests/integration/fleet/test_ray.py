"""The application on Ray Serve: two replicas on the CPU, one of which is killed under load.

Ray listens on the machine's own address and takes ports by its own lights, so it is best run where nothing else
is: `make test-ray`.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.client import Client, RetryPolicy

from tests.integration.harness.servers import launch_command

pytest.importorskip("ray", reason="ray is not installed: pip install 'normserve[ray]'")

HERE = Path(__file__).parent
_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nobody deregisters these replicas from a load balancer.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
_TITLE = b"ray::ServeReplica:normserve:normserve"


@pytest.fixture(scope="module")
def ray_server():
    running = launch_command([sys.executable, str(HERE / "ray_server.py"), "2"], {**os.environ, **_ENVIRONMENT})
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def api(ray_server):
    with ray_server.client() as client:
        yield client


def replicas() -> list[int]:
    """The process ids of this network's replicas."""
    own = Path("/proc/self/ns/net").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(_TITLE) and (process / "ns/net").readlink() == own:
                found.append(int(process.name))
    return found


def processes(api: httpx.Client) -> set[str]:
    """The labels of the replicas that a scrape shows as ready."""
    lines = api.get("/metrics").text.splitlines()
    head, tail = 'normserve_ready{process="', '"} 1.0'
    return {line[len(head) : -len(tail)] for line in lines if line.startswith(head) and line.endswith(tail)}


def normalised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("shape", [(2, 8), (4096, 1024)])
def test_an_operation_is_answered_right(ray_server, shape):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    with Client(ray_server.url) as client:
        np.testing.assert_allclose(client.layer_norm(x).y, normalised(x), atol=1e-5)


def test_errors_are_the_servers_own(api):
    wrong = api.post("/v1/layer_norm?epss=1", content=api.get("/sample.npy").content)
    assert wrong.status_code == 422
    assert wrong.headers["content-type"] == "application/problem+json"
    assert "eps" in wrong.json()["detail"]
    assert wrong.headers.get_list("x-request-id") == [wrong.json()["request_id"]]
    assert api.get("/nothing").json()["code"] == "not_found"


def test_layers_are_not_registered_by_halves(api):
    body = {"content": b"\x02\0\0\0\0\0\0\0{}", "headers": {"content-type": "application/x-safetensors"}}
    refused = api.put("/v1/layers/a?op=rms_norm", **body)
    assert refused.status_code == 405
    assert "checkpoint" in refused.json()["detail"]
    assert api.get("/v1/layers").json() == {"layers": []}


def test_a_scrape_shows_every_replica(api, until):
    until(lambda: len(processes(api)) == 2)


class Load:
    """Eight clients that ask one after another until it is enough.

    Attributes:
        answered: right answers of each.
        faults: what any of them met; it asks no more then.
    """

    def __init__(self, url: str, policy: RetryPolicy) -> None:
        self._url, self._policy = url, policy
        self._x = np.random.default_rng(1).standard_normal((64, 1024), dtype=np.float32)
        self._expected = normalised(self._x)
        self._enough = threading.Event()
        self.answered = [0] * 8
        self.faults: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(8)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._enough.set()
        for thread in self._threads:
            thread.join(30)

    def goes_on_after(self, then: list[int]) -> bool:
        """Everybody has had twenty answers since then, or somebody met a fault."""
        return bool(self.faults) or all(now > before + 20 for now, before in zip(self.answered, then, strict=True))

    def _ask(self, index: int) -> None:
        with Client(self._url, retries=self._policy) as client:
            while not self._enough.is_set():
                try:
                    np.testing.assert_allclose(client.layer_norm(self._x).y, self._expected, atol=1e-5)
                except Exception as fault:
                    self.faults.append(fault)
                    return
                self.answered[index] += 1


def test_a_replica_killed_under_load_costs_nobody_an_answer(ray_server, until):
    until(lambda: len(replicas()) == 2)
    with Load(ray_server.url, RetryPolicy()) as load:
        until(lambda: load.goes_on_after([0] * 8))
        victim = replicas()[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(replicas()) - {victim}) == 2)
        then = list(load.answered)
        until(lambda: load.goes_on_after(then))
    assert load.faults == []


def test_a_replica_that_is_no_longer_wanted_finishes_what_it_has(ray_server, api, until):
    until(lambda: len(processes(api)) == 2)
    with Load(ray_server.url, RetryPolicy(tries=1)) as load:
        until(lambda: load.goes_on_after([0] * 8))
        ray_server.process.send_signal(signal.SIGUSR1)
        until(lambda: len(replicas()) == 1)
        then = list(load.answered)
        until(lambda: load.goes_on_after(then))
    assert load.faults == []
