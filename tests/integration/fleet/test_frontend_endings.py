"""Front ends when their supervisor or the process with the device ends, and when all end."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.integration.fleet.test_frontends import load, samples
from tests.integration.harness.fleets import on_each
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.stage import stage_on
from tests.integration.harness.wire import assert_alive, assert_problem, npy


@pytest.fixture
def served(start_server):
    return start_server("--frontends", "2")


@pytest.fixture
def stage(start_server, tmp_path, until):
    def start(**how):
        return start_server("--frontends", "2", "--drain-s", "1", **how)

    with stage_on(start, tmp_path / "gate", until) as stage:
        yield stage


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def is_there(pid: int) -> bool:
    """A process, not what is left of one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_counters_begin_anew_with_the_process_that_has_them_and_nothing_else_is_lost(served, until):
    with served.client() as api:
        with load(served.url) as asking:
            until(lambda: min(asking.right) > 5)
            began = samples(api)["process_start_time_seconds"]
            os.kill(served.owner, signal.SIGKILL)
            until(lambda: min(asking.not_ready) > 0)
            before = list(asking.right)
            until(lambda: all(now > was for now, was in zip(asking.right, before, strict=True)))
        read = samples(api)
        assert read["process_start_time_seconds"] > began
        # What front ends refused while nobody was there to count it.
        assert read['normserve_errors_total{cause="not_ready"}'] == sum(asking.not_ready)
        answered = (
            'normserve_requests_total{op="layer_norm",pass="forward",dtype="float32",transport="tcp",code="200"}'
        )
        assert 0 < read[answered] < sum(asking.right)
        again = samples(api)
        counters = [name for name in read if name.partition("{")[0].endswith(("_total", "_count", "_bucket"))]
        assert counters
        assert all(again[name] >= read[name] for name in counters)


def test_sighup_without_tls_ends_none_of_them(served, until):
    pids = children(served.process.pid)
    for number, pid in enumerate([served.process.pid, *pids], 1):
        os.kill(pid, signal.SIGHUP)
        until(lambda count=number: served.log.count("SIGHUP came and is ignored") == count)
    assert children(served.process.pid) == pids
    on_each(served.url, assert_alive, 2)


def test_processes_end_with_the_one_that_started_them(served, until):
    pids = children(served.process.pid)
    assert len(pids) == 3
    with Connection(served.address) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        os.kill(served.process.pid, signal.SIGKILL)
        until(lambda: not any(map(is_there, pids)))
    with pytest.raises(httpx.ConnectError), served.client() as api:
        api.get("/livez")


def test_processes_at_work_end_with_the_one_that_started_them(stage, until):
    pids = children(stage.server.process.pid)
    running = stage.occupy_device()
    os.kill(stage.server.process.pid, signal.SIGKILL)
    until(lambda: not any(map(is_there, pids)))
    # Within --drain-s it would have been answered.
    assert_problem(running.result(), 503, "draining")


def test_the_second_signal_ends_all_at_once(start_server, tmp_path, until):
    def start(**how):
        return start_server("--frontends", "2", **how)

    with stage_on(start, tmp_path / "gate", until) as stage:
        pids = children(stage.server.process.pid)
        running = stage.occupy_device()
        stage.server.terminate()
        until(lambda: "draining" in stage.server.log)
        assert all(map(is_there, pids))
        stage.server.terminate()
        assert stage.server.wait(25) == 1
        assert not any(map(is_there, pids))
        assert running.result().status_code == 503


def test_the_first_signal_lets_a_slow_reader_have_its_response(served, until):
    on_each(served.url, assert_alive, 2)
    body = npy(np.ones((2**14, 1024), np.float32))
    with Connection(served.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        served.terminate()
        until(lambda: "draining" in served.log)
        received = 12
        while data := connection.recv(2**20):
            received += len(data)
    assert received > len(body)
    assert served.wait() == 0
