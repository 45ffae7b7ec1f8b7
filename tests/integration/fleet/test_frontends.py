"""Processes that speak HTTP for the one with the device: one server to its clients, whoever of them dies."""

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.harness.fleets import WEIGHT, clients, layers, on_each, put
from tests.integration.harness.load import Load
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.stage import stage_on
from tests.integration.harness.wire import assert_alive, assert_problem, from_npy, npy, post

HANG_S = 4
_PIDFD_GETFD = 438
X = np.linspace(-3, 3, 64 * 1024, dtype=np.float32).reshape(64, 1024) ** 3
Y = torch.nn.functional.layer_norm(torch.from_numpy(X), (1024,)).numpy()


@pytest.fixture(scope="module")
def served(launched):
    """As users start it: processes of other servers here are forked, and have other descriptors besides."""
    return launched("--frontends", "2", preloaded=False)


@pytest.fixture(scope="module")
def mortal(launched):
    return launched("--frontends", "2", "--hang-s", str(HANG_S))


@pytest.fixture(scope="module")
def shared_stage(launched, tmp_path_factory, until):
    def start(**how):
        return launched("--frontends", "2", "--max-inflight-requests", "8", **how)

    with stage_on(start, tmp_path_factory.mktemp("stage") / "gate", until) as stage:
        yield stage


def front_ends(api) -> list[dict]:
    return api.get("/v1/info").json()["front_ends"]


def samples(api) -> dict[str, float]:
    lines = [line for line in api.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def nothing_is_held(api) -> bool:
    read = samples(api)
    gauges = ("inflight_requests", "inflight_bytes", "queue_requests", 'slab_bytes{state="used"}')
    return all(read[f"normserve_{gauge}"] == 0 for gauge in gauges)


def sockets_of(pid: int) -> int:
    """How many a process has open."""
    opened = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH115, PTH208
    return len([each for each in opened if each.startswith("socket:")])


def links_of(pid: int, supervisor: int) -> list[socket.socket]:
    """A front end's sockets to those that own devices: its supervisor has made them, and its channel."""
    channel = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2]
    process = os.pidfd_open(pid)
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        if each.name == channel.decode() or not str(each.readlink()).startswith("socket:"):
            continue
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(each.name), 0)
        if descriptor < 0:
            assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
            pytest.skip("descriptors of other processes are not to be had here")
        opened = socket.socket(fileno=descriptor)
        peer = (
            opened.family == socket.AF_UNIX
            and struct.unpack("3i", opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        )
        if peer == supervisor:
            found.append(opened)
        else:
            opened.close()
    os.close(process)
    return found


def linked(api) -> list[dict] | None:
    """Front ends; None where the one that is asked has no link itself."""
    return api.get("/v1/info").json().get("front_ends")


def has_ended(connection: Connection) -> bool:
    """Whether the server has closed a connection without a response."""
    return bool(select.select([connection], [], [], 0)[0]) and not connection.everything()


def load(url: str) -> Load:
    body = npy(X)
    return Load(
        url,
        lambda api: api.post("/v1/layer_norm", content=body),
        lambda answer: np.allclose(from_npy(answer.content), Y, atol=1e-5),
    )


def test_all_of_them_are_one_server(served):
    def answers(api) -> int:
        assert_alive(api)
        large = np.repeat(X, 16, 0)
        answer = api.post("/v1/layer_norm", content=npy(large))
        np.testing.assert_allclose(from_npy(answer.content), np.repeat(Y, 16, 0), atol=1e-5)
        return len(front_ends(api))

    with served.client() as api:
        name = 'normserve_requests_total{op="layer_norm",pass="forward",dtype="float32",transport="tcp",code="200"}'
        before = samples(api).get(name, 0)
        assert on_each(served.url, answers, 4) == [2] * 4
        read = samples(api)
        assert read[name] == before + 8
        assert read["normserve_ready"] == 1
        assert not [series for series in read if "process=" in series]
        told = {series for series in read if "frontend=" in series}
        kinds = ("cpu_seconds_total", "resident_memory_bytes", "open_fds")
        assert told == {f'normserve_frontend_{kind}{{frontend="{index}"}}' for kind in kinds for index in range(2)}
        assert all(read[series] > 0 for series in told)
        assert "processes" not in api.get("/v1/info").json()


def test_connections_are_spread_and_counted(served, until):
    with served.client() as api, clients(served.url, 6) as others:
        pids = {each["pid"] for each in front_ends(api)}
        for other in others:
            assert_alive(other)
        until(lambda: samples(api)["normserve_connections"] >= 7)
        # Its channel and its link beside three connections or more.
        assert all(sockets_of(pid) >= 5 for pid in pids)
    with served.client() as api:
        until(lambda: samples(api)["normserve_connections"] == 1)


def test_layers_are_everywhere_at_once(served):
    with clients(served.url, 4) as apis:
        assert put(apis[0], "shared").status_code == 201
        for api in apis:
            assert [each["name"] for each in layers(api)] == ["shared"]
        assert apis[1].delete("/v1/layers/shared").status_code == 204
        assert all(layers(api) == [] for api in apis)


def test_idle_ones_take_no_time(served):
    with served.client() as api:
        pids = [each["pid"] for each in front_ends(api)]

    def seconds(pid: int) -> float:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0]) / 1e9

    before = [seconds(pid) for pid in pids]
    time.sleep(1)
    assert all(seconds(pid) - was < 0.1 for pid, was in zip(pids, before, strict=True))


def test_a_link_that_breaks_comes_again(served, until):
    with served.client() as api:
        before = front_ends(api)
        with load(served.url) as asking:
            until(lambda: min(asking.right) > 5)
            (link,) = links_of(before[0]["pid"], served.process.pid)
            with link:
                link.shutdown(socket.SHUT_RDWR)
            until(lambda: max(asking.not_ready) > 0)
            until(lambda: linked(api) == before)
            right = list(asking.right)
            until(lambda: all(now > was + 5 for now, was in zip(asking.right, right, strict=True)))
        assert (asking.wrong, sum(asking.broken)) == ([], 0)
        # Front ends report the end of a connection after its client has closed it.
        until(lambda: samples(api)["normserve_connections"] == 1)
        assert samples(api)["normserve_inflight_requests"] == 0


def test_limits_are_of_all_together(stage):
    running = stage.occupy_device()
    waiting = [stage.post_later(8) for _ in range(7)]
    stage.wait_for_queue(7)
    with clients(stage.server.url, 4) as apis:
        for api in apis:
            refused = post(api)
            assert_problem(refused, 429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
    stage.open_gate()
    assert [each.result().status_code for each in (running, *waiting)] == [200] * 8


def test_rows_from_several_share_a_launch(stage):
    running = stage.occupy_device()
    with clients(stage.server.url, 4) as apis, ThreadPoolExecutor(4) as pool:
        row = npy(np.ones((1, 77), np.float32))
        answers = [pool.submit(api.post, "/v1/layer_norm", content=row) for api in apis]
        stage.wait_for_queue(4)
        stage.open_gate()
        assert [int(each.result().headers["x-batch-size"]) for each in answers] == [4] * 4
    assert running.result().status_code == 200


def test_what_a_client_that_left_had_queued_is_not_run(stage, until):
    stage.occupy_device()
    body = npy(np.ones((5, 78), np.float32))
    with Connection(stage.server.address) as connection:
        connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body)
        stage.wait_for_queue(1)
    stage.wait_for_queue(0)
    stage.open_gate()
    assert_alive(stage.http)
    assert "ran 5x78" not in stage.server.log


def test_what_was_admitted_is_answered_before_the_end(stage_of):
    stage = stage_of("--frontends", "2", "--max-inflight-requests", "8")
    running = stage.occupy_device()
    waiting = stage.post_later(9)
    stage.wait_for_queue(1)
    stage.server.terminate()
    stage.until(lambda: "draining" in stage.server.log)
    assert_problem(stage.post(8), 503, "draining")
    stage.open_gate()
    assert [running.result().status_code, waiting.result().status_code] == [200, 200]
    assert stage.server.wait() == 0


def test_one_that_is_killed_takes_only_its_own_connections_along(mortal, until):
    with mortal.client() as api:
        body = npy(np.ones((2**12, 1024), np.float32))
        sockets = {each["pid"]: sockets_of(each["pid"]) for each in front_ends(api)}
        with Connection(mortal.address) as one, Connection(mortal.address) as other:
            for connection in (one, other):
                connection.sendall(head("/v1/layer_norm", f"Content-Length: {len(body)}") + body[:100_000])
            until(lambda: samples(api)["normserve_inflight_requests"] == 2)
            # A body is half received there; connections of the load may be idle at the moment, and notice nothing.
            killed = max(sockets, key=lambda pid: sockets_of(pid) - sockets[pid])
            with load(mortal.url) as asking:
                until(lambda: min(asking.right) > 5)
                os.kill(killed, signal.SIGKILL)
                until(lambda: has_ended(one) or has_ended(other))
                before = list(asking.right)
                until(lambda: all(now > was + 5 for now, was in zip(asking.right, before, strict=True)))
            assert asking.wrong == []
            assert sum(asking.not_ready) == 0
            assert max(asking.broken) <= 1
    with mortal.client() as api:
        until(lambda: nothing_is_held(api))
        until(lambda: len(front_ends(api)) == 2)
        assert killed not in {each["pid"] for each in front_ends(api)}
    on_each(mortal.url, assert_alive, 4)


def test_one_that_hangs_is_replaced(mortal, until):
    with clients(mortal.url, 2) as apis:
        stopped = front_ends(apis[0])[0]["pid"]
        os.kill(stopped, signal.SIGSTOP)

        def is_replaced() -> bool:
            with mortal.client() as api:
                there = front_ends(api)
            return len(there) == 2 and stopped not in {each["pid"] for each in there}

        until(lambda: "gets no new connections" in mortal.log)
        until(is_replaced)
    on_each(mortal.url, assert_alive, 4)


def test_the_owner_dies_and_connections_stay(mortal, until):
    with mortal.client() as api:
        assert put(api, "kept", WEIGHT).status_code == 201
        owner = mortal.owner
        with load(mortal.url) as asking:
            until(lambda: min(asking.right) > 5)
            os.kill(owner, signal.SIGKILL)
            until(lambda: min(asking.not_ready) > 0)
            before = list(asking.right)
            until(lambda: all(now > was for now, was in zip(asking.right, before, strict=True)))
        assert asking.wrong == []
        assert sum(asking.broken) == 0
        # On the connection that was there before.
        assert [each["name"] for each in layers(api)] == ["kept"]
        until(lambda: nothing_is_held(api))
        assert len(front_ends(api)) == 2


def test_a_server_of_two_devices_and_two_front_ends(launched, until):
    both = launched("--frontends", "2", "--devices", "cpu,cpu")
    with clients(both.url, 3) as apis:
        assert put(apis[0], "twice").status_code == 201
        for _ in range(3):
            for api in apis:
                assert [each["name"] for each in layers(api)] == ["twice"]
                assert_alive(api)
        assert [each["index"] for each in apis[0].get("/v1/info").json()["processes"]] == [0, 1]
        read = samples(apis[0])
        labels = 'op="layer_norm",pass="forward",dtype="float32",transport="tcp",code="200"'
        assert all(read[f'normserve_requests_total{{process="{index}",{labels}}}'] > 0 for index in range(2))
        # Told once, though both are linked to them.
        told = {series for series in read if series.startswith("normserve_frontend_open_fds")}
        assert told == {f'normserve_frontend_open_fds{{process="0",frontend="{index}"}}' for index in range(2)}
