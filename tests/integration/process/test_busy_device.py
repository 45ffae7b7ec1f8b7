"""What happens to requests while the device is busy, out of memory or wrong, and what they leave behind."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.misbehaving_server import HAS_A_BUG, RUNS_DRY
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.stage import Stage
from tests.integration.harness.wire import SAFETENSORS, assert_alive, assert_problem, npy, packed, post


def test_deadline_is_kept_while_the_device_is_busy(stage):
    running = stage.occupy_device()
    late = stage.post(8, rows=5, timeout_ms=50)
    assert_problem(late, 504, "deadline_exceeded")
    assert not running.done()
    stage.open_gate()
    assert running.result().status_code == 200
    assert "ran 5x8" not in stage.server.log


def left_in_queue(stage: Stage) -> int:
    found = re.search(r'normserve_cancelled_total\{stage="queue"\} (\d+)', stage.http.get("/metrics").text)
    return int(found[1]) if found else 0


def test_client_that_left_the_queue_costs_no_kernel(stage):
    before = left_in_queue(stage)
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
    assert left_in_queue(stage) == before + 1


def test_what_gathers_while_the_device_is_busy_shares_a_launch(stage, until):
    running = stage.occupy_device()
    together = [stage.post_later(8, rows=rows) for rows in (1, 2, 3)]
    stage.wait_for_queue(3)
    stage.open_gate()
    assert running.result().headers["x-batch-size"] == "1"
    for rows, response in zip((1, 2, 3), together, strict=True):
        headers = response.result().headers
        assert headers["x-batch-size"] == "3"
        assert int(headers["x-kernel-bytes"]) == rows * 8 * 4 * 2
    until(lambda: "ran 6x8" in stage.server.log)


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


def test_out_of_memory_is_that_requests_alone(stage):
    dry = stage.post(RUNS_DRY)
    assert_problem(dry, 503, "device_out_of_memory")
    assert "retry-after" in dry.headers
    assert_alive(stage.http)
    assert stage.http.get("/readyz").status_code == 200


def test_bug_in_the_backend_is_500_and_no_more(stage):
    assert_problem(stage.post(HAS_A_BUG), 500, "internal")
    stage.until(lambda: "injected" in stage.server.log)
    assert "injected" not in stage.post(HAS_A_BUG).text
    assert_alive(stage.http)


def test_livez_is_answered_while_a_large_request_is_computed(server, api, until):
    url, content = server.url + "/v1/rms_norm?activation=gelu", npy(np.ones((4096, 4096), np.float16))

    def is_answered_meanwhile() -> bool:
        with ThreadPoolExecutor(1) as pool:
            large = pool.submit(httpx.post, url, content=content, timeout=60)
            answered = 0
            while not large.done():
                assert api.get("/livez").status_code == 200
                answered += 1
        assert large.result().status_code == 200
        return answered >= 3

    # On a busy machine this process may be the one that waits.
    until(is_answered_meanwhile)


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
        stage.until(lambda: slab_bytes_in_use(stage) == 0)


def test_what_is_late_leaves_no_slab_behind(stage):
    running = stage.occupy_device()
    # What runs has a slab of its own, unless its body came with its header.
    before = slab_bytes_in_use(stage)
    assert stage.post(8, rows=50_000, timeout_ms=50).status_code == 504
    stage.until(lambda: slab_bytes_in_use(stage) == before)
    stage.open_gate()
    assert running.result().status_code == 200


def test_client_that_pipelined_and_left_leaves_nothing_behind(stage):
    errors = stage.server.log.count("unexpected error in a request")
    running = stage.occupy_device()
    body = npy(np.ones((9, 11), np.float32))
    with Connection(stage.server.address) as connection:
        connection.sendall(2 * (head("/v1/layer_norm", f"Content-Length: {len(body)}") + body))
        stage.wait_for_queue(1)
    stage.open_gate()
    assert running.result().status_code == 200
    stage.until(lambda: "normserve_inflight_requests 0.0" in stage.http.get("/metrics").text)
    assert stage.server.log.count("unexpected error in a request") == errors
