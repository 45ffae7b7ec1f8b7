"""Clients, servers and connections that end, at any point: nothing is left over, and nobody else notices."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from normserve.client import Client, ConnectionFailedError, RetryPolicy
from normserve.codec import local_messages as frames

from tests.chaos.local import churn
from tests.integration.harness.local_wire import LocalConnection, request
from tests.integration.harness.misbehaving_server import WAITS
from tests.integration.harness.servers import of_one_process
from tests.integration.harness.stage import SCRIPT, stage_on

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
ONCE = RetryPolicy(tries=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("endings") / "normserve.sock"


@pytest.fixture(scope="module")
def local(launched, path):
    return launched("--local", str(path), "--local-bytes", str(2**28))


@pytest.fixture
def stage(launched, tmp_path, until):
    socket = tmp_path / "stage.sock"
    with stage_on(lambda **how: launched("--local", str(socket), **how), tmp_path / "gate", until) as stage:
        stage.path = socket
        yield stage


@pytest.fixture(scope="module")
def http(local):
    with local.client() as client:
        yield client


def held(server, http) -> dict[str, float]:
    """What the server holds for its clients; a client of every reading's own would be among the descriptors."""
    text = http.get("/metrics").text
    gauges = ("local_bytes", "local_connections", "inflight_requests", "inflight_bytes", "queue_requests")
    told = {name: float(re.search(rf"^normserve_{name} (\S+)", text, re.M)[1]) for name in gauges}
    return told | {"descriptors": server.descriptors()}


def assert_alive(path) -> None:
    with LocalConnection(path) as other:
        assert other.layer_norm(X).status == 200


class OtherProcess:
    """A client in a process of its own, that can be killed and stopped."""

    def __init__(self, path, body: str) -> None:
        program = (
            "import sys, time, numpy as np, msgspec\n"
            "from normserve.codec import local_messages as frames\n"
            "from tests.integration.harness.local_wire import LocalConnection, located, request\n"
            "client = LocalConnection(sys.argv[1]); client.grow(2**22)\n" + body
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def said(self) -> str:
        return self.process.stdout.readline().strip()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


BEFORE = "print('there', flush=True); sys.stdin.read()\n"
BUSY = "print('there', flush=True)\nwhile True: client.layer_norm(np.ones((512, 256), np.float32))\n"
AFTER = "client.layer_norm(np.ones((8, 8), np.float32)); print('there', flush=True); sys.stdin.read()\n"
CLOSED = "client.send([request((64, 1024))] * 60, 1); client.socket.close()\n" + BEFORE


@pytest.mark.parametrize("body", [BEFORE, BUSY, AFTER, CLOSED], ids=["before", "during", "after", "closed"])
def test_a_client_that_is_killed_leaves_nothing(local, http, path, until, settled, body):
    before = settled(lambda: held(local, http))
    with LocalConnection(path) as other:
        assert other.layer_norm(X).status == 200
        with OtherProcess(path, body) as client:
            assert client.said() == "there"
            client.end()
        assert other.layer_norm(X).status == 200
    until(lambda: held(local, http) == before)


def test_what_a_killed_client_had_queued_is_not_run(stage, until, settled):
    waiting = f"client.send(request((1, {WAITS})), 1); client.send(request((5, 77)), 2)\n" + BEFORE
    stage.wait_for_queue(0)
    before = settled(lambda: held(stage.server, stage.http))
    with OtherProcess(stage.path, waiting) as client:
        assert client.said() == "there"
        stage.wait_for_queue(1)
        client.end()
        stage.wait_for_queue(0)
    stage.open_gate()
    until(lambda: held(stage.server, stage.http) == before)
    assert_alive(stage.path)
    assert "ran 5x77" not in stage.server.log
    # What ran already was not disturbed.
    stage.until(lambda: f"ran 1x{WAITS}" in stage.server.log)


def test_a_request_that_is_taken_back_does_not_run(stage):
    with LocalConnection(stage.path) as client:
        client.grow()
        client.send(request((1, WAITS)), 1)
        stage.until(lambda: "waiting" in stage.server.log)
        client.send(request((5, 78)), 2)
        stage.wait_for_queue(1)
        for tag in (2, 1, 99):
            client.send(frames.CancelRequestMessage(tag))
        # One that runs has its result: it is written already.
        assert client.receive()[1].problem["code"] == "client_left"
        stage.open_gate()
        tag, answer = client.receive()
        assert (tag, answer.status) == (1, 200)
        assert_alive(stage.path)
        assert "ran 5x78" not in stage.server.log


def test_a_client_that_gives_up_keeps_the_places_until_they_are_written(stage):
    # So long that memory comes within it on a busy machine, too.
    with Client(f"unix://{stage.path}", timeout_s=2.0, retries=ONCE) as client:
        x = np.ones((1, WAITS), np.float32)
        small = client.empty((1, 8))
        small[:] = 1
        with pytest.raises(TimeoutError):
            client.layer_norm(x, bias=np.full(WAITS, 5, np.float32))
        mine = [client.empty((1, WAITS)) for _ in range(50)]
        for each in mine:
            each[:] = 1
        stage.open_gate()
        answers = 0
        while answers < 20:
            # On a busy machine this, too, may take longer than the client waits.
            with contextlib.suppress(TimeoutError):
                client.layer_norm(small)
                answers += 1
        assert all((each == 1).all() for each in mine)


def test_clients_closed_after_timeouts_leave_nothing(stage, until, settled):
    stage.wait_for_queue(0)
    before = settled(lambda: held(stage.server, stage.http))
    # What other tests left.
    gc.collect()
    own = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with Client(f"unix://{stage.path}", timeout_s=0.3, retries=ONCE) as client, pytest.raises(TimeoutError):
            client.layer_norm(np.ones((1, WAITS), np.float32))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == own
    stage.open_gate()
    until(lambda: held(stage.server, stage.http) == before)
    assert_alive(stage.path)


def test_a_client_that_is_stopped_while_results_are_owed(stage):
    with OtherProcess(
        stage.path, f"client.send([request((1, {WAITS}))] + [request((2, 12))] * 50, 1)\n" + BEFORE
    ) as client:
        assert client.said() == "there"
        stage.wait_for_queue(50)
        client.process.send_signal(signal.SIGSTOP)
        stage.open_gate()
        stage.wait_for_queue(0)
        assert_alive(stage.path)
        client.process.send_signal(signal.SIGCONT)


def test_many_connections_leave_nothing(local, http, path, until, settled):
    def come_and_go(count):
        for number in range(count):
            with LocalConnection(path, greet=number % 3 > 0) as client:
                if number % 3 == 2:
                    client.layer_norm(X)

    come_and_go(20)
    before, resident = settled(lambda: held(local, http)), local.resident_bytes()
    threads = [threading.Thread(target=come_and_go, args=(100,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: held(local, http) == before)
    assert local.resident_bytes() < resident + 16 * 2**20


def test_connections_that_leave_answers_unread_leave_nothing(local, http, path, until, settled):
    before = settled(lambda: held(local, http))
    for number in range(100):
        with LocalConnection(path, greet=False) as client:
            for message in (frames.HelloMessage(frames.VERSION), frames.GrowArenaMessage(2**20), request((2, 12))):
                client.send(message)
            time.sleep(0.001 * (number % 10))
            client.send(frames.FreeSegmentMessage(0))
    until(lambda: held(local, http) == before)


def test_memory_that_clients_did_not_wait_for_is_not_theirs(local, http, path, until, settled):
    before = settled(lambda: held(local, http))
    # More than the quota.
    for number in range(300):
        # While the server has not noticed the ends of many, it refuses others.
        with LocalConnection(path, greet=False) as client, contextlib.suppress(BrokenPipeError):
            client.send(frames.HelloMessage(frames.VERSION))
            client.send(frames.GrowArenaMessage(2**20))
            time.sleep(0.001 * (number % 3))
    until(lambda: held(local, http) == before)


def test_the_servers_end_is_one_clear_error_and_results_stay(launched, tmp_path):
    path = tmp_path / "mortal.sock"
    server = launched("--local", str(path))
    with Client(f"unix://{path}", retries=ONCE) as client:
        x = client.empty((2, 12))
        x[:] = X
        y = client.layer_norm(x).y
        expected = y.copy()
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait()
        for _ in range(2):
            with pytest.raises(ConnectionFailedError):
                client.layer_norm(x)
        launched("--local", str(path))
        # The old arena is the client's own memory now, from which tensors are copied.
        assert (client.layer_norm(x).y == expected).all()
        assert (y == expected).all()
        assert (x == X).all()


@of_one_process
def test_a_call_that_the_server_died_over_is_one_clear_error(launched, tmp_path, until):
    path = tmp_path / "killed.sock"
    server = launched("--local", str(path), env={"GATE": str(tmp_path / "gate")}, script=SCRIPT)
    raised = []

    def call(client):
        with pytest.raises(ConnectionFailedError) as caught:
            client.layer_norm(np.ones((1, WAITS), np.float32))
        raised.append(caught.value)

    with Client(f"unix://{path}", retries=ONCE, timeout_s=20) as client:
        thread = threading.Thread(target=call, args=(client,))
        thread.start()
        until(lambda: "waiting" in server.log)
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait()
        thread.join(20)
        assert len(raised) == 1
        launched("--local", str(path))
        np.testing.assert_allclose(client.layer_norm(X).y.mean(1), 0, atol=1e-6)


def test_clients_that_are_killed_by_turns_cost_the_others_nothing(local, path):
    outcome = churn(local, path, 1500, every_s=0.2, clients=4)
    assert outcome.faults == []
    assert outcome.calls >= 1500
    assert outcome.killed > 0


def test_a_drain_answers_what_was_admitted_and_refuses_the_rest(launched, tmp_path, until):
    path, gate = tmp_path / "drained.sock", tmp_path / "gate"
    server = launched("--local", str(path), env={"GATE": str(gate)}, script=SCRIPT)
    with (
        LocalConnection(path) as client,
        LocalConnection(path) as idle,
        Client(f"unix://{path}", retries=ONCE) as held,
    ):
        kept = held.empty((4, 4))
        kept[:] = 5
        client.grow()
        client.array(0, 0, (1, WAITS))[:] = 1
        client.send(request((1, WAITS)), 1)
        until(lambda: "waiting" in server.log)
        server.terminate()
        until(lambda: "draining" in server.log)
        idle.send(request((1, 8)), 2)
        gate.touch()
        tag, answer = client.receive()
        assert (tag, answer.status) == (1, 200)
        assert (client.y((1, WAITS)) == 0).all()
        with contextlib.suppress(TypeError):
            _, refused = idle.receive()
            assert refused.status in (422, 503)
        assert server.wait() == 0
        assert client.receive() is None
        assert not path.exists()
        gc.collect()
        assert (kept == 5).all()


def test_a_server_that_cannot_wait_any_longer_cuts_off_what_still_runs(launched, tmp_path, until):
    path, gate = tmp_path / "hasty.sock", tmp_path / "gate"
    server = launched("--local", str(path), "--drain-s", "0.3", env={"GATE": str(gate)}, script=SCRIPT)
    with LocalConnection(path) as client:
        client.grow()
        client.send(request((1, WAITS)), 1)
        until(lambda: "waiting" in server.log)
        server.terminate()
        # No answer: with one the client would use the place for something else, and be written over.
        assert client.receive() is None
        gate.touch()
        server.wait()


def test_a_fleet_serves_them_in_every_process(launched, tmp_path, until):
    path = tmp_path / "fleet.sock"
    launched("--local", str(path), "--devices", "cpu,cpu")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(f"unix://{path}", retries=ONCE)) for _ in range(4)]
        for number, client in enumerate(clients):
            y = client.layer_norm(X, bias=np.full(12, number, np.float32)).y
            np.testing.assert_allclose(y.mean(1), number, atol=1e-5)
        assert {process["state"] for process in clients[0].info()["processes"]} == {"ready"}
        clients[0].put_layer("ln", "layer_norm", np.ones(12, np.float32))
        for client in clients:
            assert client.layer_norm(X, layer="ln").y.shape == X.shape
