"""Several processes behind one port: each is reached, they know the same layers, and one that dies comes back."""

import contextlib
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.fleets import WEIGHT, assert_right, normalised, on_each, pids, processes, put
from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import assert_alive, assert_problem, from_npy, npy


@pytest.fixture(scope="module")
def fleet(launched):
    return launched("--devices", "cpu,cpu")


@pytest.mark.slow
def test_a_fleet_as_users_start_it(start_server):
    """No process is forked, each starts with imports."""
    fleet = start_server("--devices", "cpu,cpu", preloaded=False)
    assert len(pids(fleet.url)) == 2
    on_each(fleet.url, assert_alive)
    fleet.terminate()
    assert fleet.wait() == 0


def test_connections_go_to_every_process_in_turn(fleet):
    def who(api) -> str:
        text = api.get("/metrics").text
        assert_alive(api)
        return text

    on_each(fleet.url, assert_alive, 6)
    text = on_each(fleet.url, who, 1)[0]
    labels = 'process="(.)",op="layer_norm",pass="forward",dtype="float32",transport="tcp",code="200"'
    name = f"normserve_requests_total{{{labels}}}"
    counted = {index: float(count) for index, count in re.findall(name + r" (\S+)", text)}
    assert counted.keys() == {"0", "1"}
    assert min(counted.values()) >= 3


def test_every_process_is_reported(fleet):
    told = on_each(fleet.url, processes)
    assert told[0] == told[1]
    assert [each["index"] for each in told[0]] == [0, 1]
    assert {(each["device"], each["state"]) for each in told[0]} == {("cpu", "ready")}
    assert {each["restarts"] for each in told[0]} <= {0, 1}
    assert len({each["pid"] for each in told[0]}) == 2


def test_metrics_of_all_are_one_page(fleet):
    on_each(fleet.url, assert_alive)
    with fleet.client() as api:
        text = api.get("/metrics").text
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(families) == len(set(families))
    for index in range(2):
        assert f'normserve_ready{{process="{index}"}} 1.0' in text
        assert f'normserve_process_up{{process="{index}"}} 1.0' in text
        assert f'normserve_stage_duration_seconds_count{{process="{index}",stage="send"}}' in text


def test_a_process_that_hangs_holds_up_no_scrape(fleet):
    with fleet.client() as api:
        hung = processes(api)[1]

    def scrape(_) -> str:
        with httpx.Client(base_url=fleet.url, timeout=60, verify=False) as api:
            return api.get("/metrics").text

    os.kill(hung["pid"], signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        try:
            # The connections go to the processes in turn: one of them to the one that is well.
            first = next(as_completed([threads.submit(scrape, number) for number in range(2)], 20))
        finally:
            os.kill(hung["pid"], signal.SIGCONT)
    text = first.result()
    assert 'normserve_process_up{process="0"} 1.0' in text
    assert 'normserve_process_up{process="1"} 0.0' in text
    assert 'normserve_ready{process="1"}' not in text


def test_scrapes_leave_no_lines_in_the_log(fleet):
    with fleet.client() as api:
        before = len(fleet.lines)
        for _ in range(3):
            assert 'normserve_process_up{process="1"} 1.0' in api.get("/metrics").text
            processes(api)
            put(api, "logged")
    assert not [line for line in fleet.lines[before:] if "HTTP" in line or "http" in line]


def test_layers_are_known_to_all(fleet):
    with fleet.client() as api:
        assert put(api, "a").status_code == 201
    for answer in on_each(fleet.url, lambda api: normalised(api, "a")):
        assert_right(answer)
    with fleet.client() as api:
        assert put(api, "a", WEIGHT + 1).status_code == 200
    for answer in on_each(fleet.url, lambda api: normalised(api, "a")):
        assert_right(answer, WEIGHT + 1)
    with fleet.client() as api:
        assert api.delete("/v1/layers/a").status_code == 204
    for answer in on_each(fleet.url, lambda api: normalised(api, "a")):
        assert_problem(answer, 404, "unknown_layer")


def test_process_that_dies_comes_back_with_the_layers(fleet, until):
    with fleet.client() as api:
        put(api, "kept")
        put(api, "gone")
        api.delete("/v1/layers/gone")
    before = pids(fleet.url)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    def is_gone() -> bool:
        # A connection that it had received when it was killed breaks; later ones go to the other process.
        with contextlib.suppress(httpx.TransportError):
            return victim not in pids(fleet.url)
        return False

    until(is_gone)
    for answer in on_each(fleet.url, lambda api: normalised(api, "kept"), 4):
        assert_right(answer)
    until(lambda: len(pids(fleet.url) - {None}) == 2)
    until(lambda: {each["state"] for each in on_each(fleet.url, processes, 1)[0]} == {"ready"})
    told = on_each(fleet.url, processes, 1)[0]
    assert sorted(each["restarts"] for each in told) == [0, 1]
    for answer in on_each(fleet.url, lambda api: normalised(api, "kept"), 4):
        assert_right(answer)
    for answer in on_each(fleet.url, lambda api: normalised(api, "gone"), 4):
        assert_problem(answer, 404, "unknown_layer")


def test_large_bodies(fleet):
    x = np.random.default_rng(0).standard_normal((2000, 1024), dtype=np.float32)
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x), (1024,))
    for answer in on_each(fleet.url, lambda api: api.post("/v1/layer_norm", content=npy(x))):
        torch.testing.assert_close(torch.from_numpy(from_npy(answer.content)), expected)


def test_sigterm_ends_all_of_them(start_server, tmp_path):
    path = tmp_path / "socket"
    fleet = start_server("--devices", "cpu,cpu", "--uds", str(path), env={"NORMSERVE_API_KEY": "secret"})
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path), verify=False), base_url="http://normserve"
    ) as api:
        assert api.get("/readyz").status_code == 200
        assert_problem(api.get("/v1/info"), 401, "unauthorized")
        told = api.get("/v1/info", headers={"authorization": "Bearer secret"}).json()["processes"]
    assert all("pid" in each for each in told)
    fleet.terminate()
    assert fleet.wait() == 0
    assert not path.exists()
    for each in told:
        with pytest.raises(ProcessLookupError):
            os.kill(each["pid"], 0)


def test_sigterm_finishes_what_each_of_them_has_admitted(start_server):
    fleet = start_server("--devices", "cpu,cpu")
    body = npy(np.ones((4, 8), np.float32))
    with Connection(fleet.address) as one, Connection(fleet.address) as other:
        for connection in (one, other):
            lines = (f"Content-Length: {len(body)}", "Expect: 100-continue")
            connection.sendall(head("/v1/layer_norm", *lines))
            assert connection.recv(1024).startswith(b"HTTP/1.1 100")
            connection.sendall(body[:100])
        fleet.terminate()
        for connection in (one, other):
            connection.sendall(body[100:])
            assert connection.answer().status_code == 200
    assert fleet.wait() == 0


def test_fleet_of_which_one_cannot_start_ends(start_server):
    fleet = start_server("--devices", "cpu,7", wait=False)
    assert fleet.wait(60) == 2
    assert "the triton backend needs a CUDA device" in fleet.log
