"""A server that finishes nothing says so; one whose clients are slow does not."""

import time

import numpy as np
import pytest

from tests.integration.harness.raw import Connection, head
from tests.integration.harness.stage import SCRIPT, stage_on
from tests.integration.harness.wire import assert_problem, npy

STALL_S = 0.3


@pytest.fixture(scope="module")
def stage(tmp_path_factory, launched, until):
    def start(**options):
        return launched("--stall-s", str(STALL_S), **options)

    assert SCRIPT
    with stage_on(start, tmp_path_factory.mktemp("stall") / "gate", until) as made:
        yield made
        made.gate.unlink(missing_ok=True)


def stall_seconds(stage) -> float:
    lines = stage.http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("normserve_stall_seconds ")]
    return float(line.split()[1])


def test_slow_uploads_and_idle_servers_are_no_stall(stage):
    body = npy(np.ones((4, 8), np.float32))
    with Connection(stage.server.address) as slow:
        slow.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body[:150])
        time.sleep(2 * STALL_S)
        assert stage.http.get("/readyz").status_code == 200
        assert stall_seconds(stage) == 0
        slow.sendall(body[150:])
        assert slow.answer().status_code == 200
    assert stage.http.get("/readyz").status_code == 200


def test_a_device_that_hangs_makes_the_server_unready_until_it_goes_on(stage):
    running = stage.occupy_device()
    waiting = stage.post_later(8)
    stage.until(lambda: stage.http.get("/readyz").status_code == 503)
    refused = stage.http.get("/readyz")
    assert_problem(refused, 503, "stalled")
    assert "retry-after" in refused.headers
    assert stage.http.get("/livez").status_code == 200
    assert stall_seconds(stage) > STALL_S
    # What is refused without the device is no sign of it.
    assert_problem(stage.post(8, timeout_ms=1), 504, "deadline_exceeded")
    assert_problem(stage.http.get("/readyz"), 503, "stalled")
    stage.open_gate()
    assert running.result().status_code == waiting.result().status_code == 200
    assert stage.http.get("/readyz").status_code == 200
    assert stall_seconds(stage) == 0
