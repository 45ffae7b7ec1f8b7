"""What happens when the device is busy, broken or out of memory, and when the server starts and stops."""

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from .misbehaving_server import FAILS, HAS_A_BUG, RUNS_DRY, WAITS
from .raw import Connection, head
from .wire import SAFETENSORS, X, assert_alive, assert_problem, npy, packed, post

SCRIPT = str(Path(__file__).with_name("misbehaving_server.py"))


class Stage:
    """A misbehaving server, its gate, and clients that post to it in the background."""

    def __init__(self, server, gate: Path, pool: ThreadPoolExecutor, until: Callable) -> None:
        self.server, self.gate, self._pool, self.until = server, gate, pool, until
        self.http = server.client()

    def post(self, cols: int, rows: int = 1, **params: object) -> httpx.Response:
        content = npy(np.ones((rows, cols), np.float32))
        return self.http.post("/v1/layer_norm", content=content, params=params)

    def post_later(self, cols: int, rows: int = 1, **params: object) -> "Future[httpx.Response]":
        return self.later(self.post, cols, rows, **params)

    def later(
        self, request: Callable[..., httpx.Response], *arguments: object, **options: object
    ) -> "Future[httpx.Response]":
        return self._pool.submit(request, *arguments, **options)

    def occupy_device(self) -> "Future[httpx.Response]":
        """A request that runs until the gate opens."""
        before = self.server.log.count("waiting")
        running = self.post_later(WAITS)
        self.until(lambda: self.server.log.count("waiting") > before)
        return running

    def wait_for_queue(self, length: int) -> None:
        self.until(lambda: f"normserve_queue_requests {length}.0" in self.http.get("/metrics").text)

    def open_gate(self) -> None:
        self.gate.touch()


@contextlib.contextmanager
def stage_on(make_server: Callable, gate: Path, until: Callable) -> Iterator[Stage]:
    with ThreadPoolExecutor(8) as pool:
        server = make_server(env={"GATE": str(gate)}, script=SCRIPT)
        stage = Stage(server, gate, pool, until)
        yield stage
        stage.open_gate()
    stage.http.close()


@pytest.fixture(scope="module")
def shared_stage(tmp_path_factory, launched, until):
    gate = tmp_path_factory.mktemp("stage") / "gate"
    with stage_on(launched, gate, until) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage):
    """A stage that the module's tests share and leave as they found it: the gate is shut."""
    yield shared_stage
    shared_stage.gate.unlink(missing_ok=True)


@pytest.fixture
def stage_of(start_server, tmp_path, until):
    """Makes a stage of the test's own from the server's options."""
    with contextlib.ExitStack() as stack:

        def make(*options: str) -> Stage:
            start = functools.partial(start_server, *options)
            return stack.enter_context(stage_on(start, tmp_path / "gate", until))

        yield make


def test_deadline_is_kept_while_the_device_is_busy(stage):
    running = stage.occupy_device()
    late = stage.post(8, rows=5, timeout_ms=50)
    assert_problem(late, 504, "deadline_exceeded")
    assert not running.done()
    stage.open_gate()
    assert running.result().status_code == 200
    assert "ran 5x8" not in stage.server.log


def test_client_that_left_the_queue_costs_no_kernel(stage):
    running = stage.occupy_device()
    body = npy(np.ones((7, 9), np.float32))
    with Connection(stage.server.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body)
        stage.wait_for_queue(1)
    stage.wait_for_queue(0)
    stage.open_gate()
    assert running.result().status_code == 200
    assert_alive(stage.http)
    assert "ran 7x9" not in stage.server.log
    assert 'normserve_cancelled_total{stage="queue"} 1.0' in stage.http.get("/metrics").text


def test_what_gathers_while_the_device_is_busy_shares_a_launch(stage):
    running = stage.occupy_device()
    together = [stage.post_later(8, rows=rows) for rows in (1, 2, 3)]
    stage.wait_for_queue(3)
    stage.open_gate()
    assert running.result().headers["x-batch-size"] == "1"
    for rows, response in zip((1, 2, 3), together, strict=True):
        headers = response.result().headers
        assert headers["x-batch-size"] == "3"
        assert int(headers["x-kernel-bytes"]) == rows * 8 * 4 * 2
    assert "ran 6x8" in stage.server.log


@pytest.mark.parametrize("direction", ["", "/backward"])
def test_scale_and_shift_go_along_with_their_samples(stage, direction):
    """In a launch of several requests each sample has its own, and the bits that it has alone."""

    def adaptive(samples: int, of_samples: int) -> httpx.Response:
        numbers = torch.Generator().manual_seed(samples)
        tensors = {"x": torch.randn(samples, 6, 5, generator=numbers)}
        if direction:
            tensors["dy"] = torch.randn(samples, 6, 5, generator=numbers)
        tensors["scale"] = torch.randn(of_samples, 6, generator=numbers).half()
        tensors["shift"] = torch.randn(of_samples, 6, generator=numbers)
        path = f"/v1/group_norm{direction}?num_groups=3&activation=silu"
        return post(stage.http, path, packed(**tensors), content_type=SAFETENSORS)

    alone = [adaptive(samples, samples) for samples in (1, 2, 3)]
    running = stage.occupy_device()
    together = [stage.later(adaptive, samples, samples) for samples in (1, 2, 3)]
    stage.wait_for_queue(3)
    # As many as the launch has samples are not as many as the request has.
    assert_problem(adaptive(2, 6), 422, "invalid_shape")
    stage.open_gate()
    assert running.result().status_code == 200
    for own, shared in zip(alone, (response.result() for response in together), strict=True):
        assert own.headers["x-batch-size"] == "1"
        assert shared.headers["x-batch-size"] == "3"
        assert own.headers["x-kernel-bytes"] == shared.headers["x-kernel-bytes"]
        assert own.content == shared.content


def test_full_budgets_are_429(stage_of):
    stage = stage_of("--max-inflight-bytes", "2000", "--max-inflight-requests", "2")
    running = stage.occupy_device()
    too_long = stage.post(8, rows=100)
    fits = stage.post_later(8)
    stage.wait_for_queue(1)
    too_many = stage.post(8)
    for refused in (too_long, too_many):
        assert_problem(refused, 429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    stage.open_gate()
    assert fits.result().status_code == running.result().status_code == 200
    assert_alive(stage.http)


def test_sigterm_finishes_what_was_admitted_and_refuses_the_rest(stage_of):
    stage = stage_of()
    running, queued = stage.occupy_device(), stage.post_later(8)
    stage.wait_for_queue(1)
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    assert_problem(stage.http.get("/readyz"), 503, "draining")
    assert stage.http.get("/livez").status_code == 200
    refused = stage.post(8)
    assert_problem(refused, 503, "draining")
    assert refused.headers["connection"] == "close"
    assert "retry-after" in refused.headers
    stage.open_gate()
    assert running.result().status_code == queued.result().status_code == 200
    assert stage.server.wait() == 0


def test_what_is_not_finished_in_the_grace_time_is_told_so(stage_of):
    stage = stage_of("--drain-s", "0.5")
    running, queued = stage.occupy_device(), stage.post_later(8)
    stage.wait_for_queue(1)
    stage.server.terminate()
    for refused in (running, queued):
        assert_problem(refused.result(), 503, "draining")
        assert refused.result().headers["connection"] == "close"
    assert stage.server.wait() == 0


def test_sigterm_of_an_idle_server(start_server):
    server = start_server()
    with Connection(server.address) as idle:
        server.terminate()
        assert server.wait() == 0
        assert idle.everything() == b""


def answered_well(running: "Future[httpx.Response]") -> bool:
    try:
        return running.result().status_code == 200
    except httpx.TransportError:
        return False


def test_second_signal_stops_at_once(stage_of):
    stage = stage_of()
    running = stage.occupy_device()
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    stage.server.terminate()
    assert stage.server.wait() == 1
    assert not answered_well(running)


def test_device_failure_ends_the_process(stage_of):
    stage = stage_of()
    running, doomed = stage.occupy_device(), stage.post_later(FAILS)
    stage.wait_for_queue(1)
    behind = stage.post_later(FAILS, rows=2, dropout=0.5, seed=1)
    stage.wait_for_queue(2)
    stage.open_gate()
    assert running.result().status_code == 200
    assert_problem(doomed.result(), 500, "device_failure")
    assert_problem(behind.result(), 500, "device_failure")
    assert stage.server.wait() == 1


def test_out_of_memory_is_that_requests_alone(stage):
    dry = stage.post(RUNS_DRY)
    assert_problem(dry, 503, "device_out_of_memory")
    assert "retry-after" in dry.headers
    assert_alive(stage.http)
    assert stage.http.get("/readyz").status_code == 200


def test_bug_in_the_backend_is_500_and_no_more(stage):
    assert_problem(stage.post(HAS_A_BUG), 500, "internal")
    assert "injected" in stage.server.log
    assert "injected" not in stage.post(HAS_A_BUG).text
    assert_alive(stage.http)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_not_ready_before_the_device_is(start_server, tmp_path, until):
    gate = tmp_path / "gate"
    port = free_port()
    options = ("--port", str(port))
    server = start_server(*options, env={"GATE": str(gate), "WAIT_AT_START": "1"}, script=SCRIPT, wait=False)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        until(lambda: is_up(http))
        assert_problem(http.get("/readyz"), 503, "not_ready")
        refused = http.post("/v1/layer_norm", content=npy(X))
        assert_problem(refused, 503, "not_ready")
        assert "retry-after" in refused.headers
        assert http.get("/v1/info").json()["state"] == "starting"
        assert http.get("/").status_code == 200
        gate.touch()
        server.wait_until_ready()
        assert http.get("/readyz").status_code == 200
        assert_alive(http)


def test_livez_is_answered_while_a_large_request_is_computed(server, api):
    content = npy(np.ones((4096, 4096), np.float16))
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, server.url + "/v1/rms_norm?activation=gelu", content=content, timeout=60)
        answered = 0
        while not large.done():
            assert api.get("/livez").status_code == 200
            answered += 1
    assert large.result().status_code == 200
    assert answered >= 3


def slab_bytes_in_use(stage: Stage) -> float:
    line = next(
        line
        for line in stage.http.get("/metrics").text.splitlines()
        if line.startswith('normserve_slab_bytes{state="used"}')
    )
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize(("cols", "status"), [(RUNS_DRY, 503), (HAS_A_BUG, 500)], ids=["out-of-memory", "bug"])
def test_what_fails_on_the_device_leaves_no_slab_behind(stage, cols, status):
    for _ in range(3):
        assert stage.post(cols, rows=5000).status_code == status
        stage.until(lambda: slab_bytes_in_use(stage) == 0, 3)


def test_what_is_late_leaves_no_slab_behind(stage):
    running = stage.occupy_device()
    # What runs has a slab of its own, unless its body came with its header.
    before = slab_bytes_in_use(stage)
    assert stage.post(8, rows=50_000, timeout_ms=50).status_code == 504
    stage.until(lambda: slab_bytes_in_use(stage) == before, 3)
    stage.open_gate()
    assert running.result().status_code == 200


def test_client_that_pipelined_and_left_leaves_nothing_behind(stage):
    running = stage.occupy_device()
    body = npy(np.ones((9, 11), np.float32))
    with Connection(stage.server.address) as connection:
        connection.sendall(2 * (head("/v1/layer_norm", f"Content-Length: {len(body)}") + body))
        stage.wait_for_queue(1)
    stage.open_gate()
    assert running.result().status_code == 200
    stage.until(lambda: "normserve_inflight_requests 0.0" in stage.http.get("/metrics").text)
    assert "nobody expected" not in stage.server.log
