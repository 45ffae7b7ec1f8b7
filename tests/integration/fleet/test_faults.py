"""Processes of a fleet that are crowded, stopped or killed, and full disks: no layer in one process alone."""

import contextlib
import functools
import itertools
import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.fleets import (
    WEIGHT,
    assert_right,
    clients,
    layers,
    normalised,
    on_each,
    pids,
    processes,
    put,
    right,
)
from tests.integration.harness.load import Load
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import assert_problem, from_npy, npy, packed

HANG_S = 4
LIMITED = str(Path(__file__).with_name("limited_files.py"))


@pytest.fixture(scope="module")
def fleet(launched):
    return launched("--devices", "cpu,cpu", "--hang-s", str(HANG_S))


@pytest.fixture(scope="module")
def small(launched):
    """A fleet that admits one request in each process, on a disk that has no space for 64 KiB."""
    environment = {"FILE_BYTES": str(2**16)}
    return launched("--devices", "cpu,cpu", "--max-inflight-requests", "1", env=environment, script=LIMITED)


def assert_agreed(url: str) -> list[str]:
    one, other = on_each(url, layers)
    assert one == other
    for name in [each["name"] for each in one]:
        answers = on_each(url, functools.partial(normalised, name=name))
        np.testing.assert_array_equal(*[from_npy(answer.content) for answer in answers])
    return [each["name"] for each in one]


def load(url: str, name: str, weights: list[torch.Tensor]) -> Load:
    """Clients that normalise with a layer, which has one of these weights."""
    expected = [right(weight) for weight in weights]

    def is_right(answer: httpx.Response) -> bool:
        y = torch.from_numpy(from_npy(answer.content))
        return any(torch.allclose(y, each, atol=1e-6) for each in expected)

    return Load(url, lambda api: normalised(api, name), is_right)


def test_changes_on_both_processes_at_once_end_alike_under_load(fleet):
    """Forty at once, many more than the threads of a process."""
    weights = [WEIGHT + each for each in range(5)]
    with clients(fleet.url, 40) as apis, ThreadPoolExecutor(40) as pool:
        assert put(apis[0], "loaded", weights[0]).status_code == 201
        assert put(apis[0], "shared").status_code == 201

        def change(index: int) -> list[int]:
            api = apis[index]
            statuses = [put(api, "loaded", weights[index % 5]).status_code]
            statuses.append(put(api, f"own{index}", weights[index % 5]).status_code)
            if index % 4:
                statuses.append(api.delete(f"/v1/layers/own{index}").status_code)
            else:
                statuses.append(api.delete("/v1/layers/shared").status_code)
                statuses.append(put(api, "shared", weights[index % 3]).status_code)
            return statuses

        with load(fleet.url, "loaded", weights) as asking:
            statuses = list(itertools.chain(*pool.map(change, range(40))))
    assert asking.wrong == []
    assert sum(asking.not_ready) == 0
    assert sum(asking.broken) == 0
    assert sum(asking.right) > 0
    assert set(statuses) <= {200, 201, 204, 404}
    names = assert_agreed(fleet.url)
    assert set(names) >= {f"own{index}" for index in range(0, 40, 4)} | {"loaded", "shared"}
    assert not set(names) & {f"own{index}" for index in range(40) if index % 4}
    text = on_each(fleet.url, lambda api: api.get("/metrics").text, 1)[0]
    assert 'normserve_inflight_requests{process="0"} 0.0' in text
    assert 'normserve_inflight_requests{process="1"} 0.0' in text


def test_a_stopped_process_is_killed_and_comes_back_and_no_change_is_lost(fleet, until):
    with fleet.client() as api:
        put(api, "before")
        both = processes(api)
    victim = both[1]["pid"]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: "process 1 gives no sign" in fleet.log)
    # Nobody is sent to it any more; whoever changes a layer waits until it is certain what becomes of it.
    answers = on_each(fleet.url, lambda api: put(api, "meanwhile"), 1)
    assert answers[0].status_code == 201
    for answer in on_each(fleet.url, lambda api: normalised(api, "meanwhile"), 4):
        assert_right(answer)
    until(lambda: "process 1 has given no sign" in fleet.log)
    until(lambda: victim not in pids(fleet.url) and len(pids(fleet.url) - {None}) == 2, 60)
    until(lambda: {each["state"] for each in on_each(fleet.url, processes, 1)[0]} == {"ready"}, 60)
    for answer in on_each(fleet.url, lambda api: normalised(api, "before"), 4):
        assert_right(answer)
    assert {"before", "meanwhile"} <= set(assert_agreed(fleet.url))


def test_a_process_that_is_stopped_for_a_moment_follows(fleet, until):
    with fleet.client() as api:
        paused = processes(api)[1]["pid"]
        count = fleet.log.count("gives no sign")
        os.kill(paused, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (paused, signal.SIGCONT)).start()
        for answer in on_each(fleet.url, lambda api: put(api, "paused")):
            assert answer.status_code in (200, 201)
    assert "paused" in assert_agreed(fleet.url)
    assert fleet.log.count("gives no sign") == count


def test_a_process_killed_under_load_takes_only_its_own_connections_with_it(fleet, until):
    with fleet.client() as api:
        put(api, "survives")
        victim = processes(api)[0]["pid"]
    with load(fleet.url, "survives", [WEIGHT]) as asking, ThreadPoolExecutor(8) as pool:
        until(lambda: sum(asking.right) > 20)
        changing = [pool.submit(_put_patiently, fleet.url, f"killed{index}") for index in range(8)]
        os.kill(victim, signal.SIGKILL)
        statuses = [each.result() for each in changing]
        before = sum(asking.right)
        until(lambda: sum(asking.right) > before + 20)
    assert asking.wrong == []
    assert sum(asking.not_ready) == 0
    # Four clients, of which two may come back once to the process that is just dying.
    assert sum(asking.broken) <= 8
    assert set(statuses) <= {200, 201}
    (ended,) = [line for line in fleet.lines if "ended and is started again" in line and f"pid={victim}" in line]
    assert ended.endswith(f'child="process 0" device=cpu pid={victim} signal=SIGKILL\n')
    until(lambda: victim not in pids(fleet.url) and len(pids(fleet.url) - {None}) == 2, 60)
    until(lambda: {each["state"] for each in on_each(fleet.url, processes, 1)[0]} == {"ready"}, 60)
    assert set(assert_agreed(fleet.url)) >= {f"killed{index}" for index in range(8)}


def _put_patiently(url: str, name: str) -> int:
    while True:
        try:
            with httpx.Client(base_url=url, timeout=60, verify=False) as api:
                answer = put(api, name)
        except httpx.TransportError:
            continue
        if answer.status_code != 503:
            return answer.status_code


def test_the_folder_of_the_fleet_is_for_its_user_alone(fleet):
    (folder,) = {Path(each).parent for each in _unix_sockets(fleet) if each.endswith("/0.sock")}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def _unix_sockets(fleet) -> set[str]:
    """The paths of the sockets that the fleet's processes listen on."""
    own = set()
    for pid in pids(fleet.url):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # Connections come and go.
            with contextlib.suppress(FileNotFoundError):
                own.add(str(link.readlink()))
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in own}


def test_a_full_disk_changes_no_layer_and_says_so(small, until):
    long = torch.ones(2**16)
    (folder,) = {Path(each).parent for each in _unix_sockets(small) if each.endswith("/0.sock")}

    def stored() -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)

    with small.client() as api:
        assert put(api, "short").status_code == 201
        layers, files = assert_agreed(small.url), stored()
        for name in ("long", "short"):
            refused = put(api, name, long)
            assert_problem(refused, 503, "storage_failure")
            assert "retry-after" in refused.headers
    assert "short" in layers
    assert assert_agreed(small.url) == layers
    assert stored() == files
    for answer in on_each(small.url, lambda api: put(api, "short", WEIGHT + 1)):
        assert answer.status_code == 200
    for answer in on_each(small.url, lambda api: normalised(api, "short")):
        assert_right(answer, WEIGHT + 1)


def test_a_process_that_is_full_is_told_of_layers_all_the_same(small):
    """Its public admission is for clients."""
    with Connection(small.address) as occupying, small.client() as api:
        occupying.sendall(head("/v1/layer_norm", "Content-Length: 224", "Expect: 100-continue"))
        assert occupying.recv(1024).startswith(b"HTTP/1.1 100")
        assert put(api, "told").status_code == 201
        occupying.sendall(npy(np.ones((3, 8), np.float32)))
        assert occupying.answer().status_code == 200
    assert "told" in assert_agreed(small.url)


def test_a_process_that_can_start_no_more_ends_the_server_with_the_last_that_serves(start_server, tmp_path, until):
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes(packed(**{"ln.weight": WEIGHT, "ln.bias": WEIGHT + 1}))
    fleet = start_server("--devices", "cpu,cpu", "--checkpoint", str(checkpoint))
    first, second = pids(fleet.url)
    checkpoint.unlink()
    os.kill(first, signal.SIGKILL)
    until(lambda: "exit_code=2" in fleet.log)
    with fleet.client() as api:
        assert api.get("/readyz").status_code == 200
    assert fleet.process.poll() is None
    os.kill(second, signal.SIGKILL)
    assert fleet.wait() == 2
