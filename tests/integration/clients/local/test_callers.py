"""Who shares memory with a real server: threads, tasks and processes, with a key, and with nobody there."""

import asyncio
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from normserve.client import (
    AsyncClient,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    RetryPolicy,
    UnauthorizedError,
)

from tests.integration.clients.local.results import assert_same, random

ONCE = RetryPolicy(tries=1)


def test_threads_share_a_client(local):
    wrong = []

    def work(number):
        for count in range(40):
            x = np.full((number + 1, 64), number, np.float32)
            y = local.layer_norm(x, bias=np.full(64, number * 100 + count, np.float32)).y
            if not (y == number * 100 + count).all() or y.shape != x.shape:
                wrong.append((number, count))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tasks_share_a_client(serving, path, http):
    async def all_at_once():
        async with AsyncClient(f"unix://{path}") as client:
            x = await client.empty((3, 64), torch.bfloat16)
            x[:] = 1
            biases = [torch.full((64,), float(number)) for number in range(100)]
            results = await asyncio.gather(*[client.layer_norm(x, bias=bias) for bias in biases])
            assert [float(result.y[0, 0]) for result in results] == [float(number) for number in range(100)]
            rows = np.asarray(random(30, 48))
            assert_same(await client.layer_norm(rows, stats=True), http.layer_norm(rows, stats=True))
            with pytest.raises(InvalidRequestError):
                await client.layer_norm(rows, eps=-1.0)
            assert (await client.info())["local"]["path"] == str(path)

    asyncio.run(all_at_once())


def test_a_client_that_another_event_loop_used_connects_again(serving, path):
    x = np.ones((2, 8), np.float32)
    client = AsyncClient(f"unix://{path}", retries=ONCE)
    for _ in range(2):
        assert asyncio.run(client.layer_norm(x)).y.shape == (2, 8)
    asyncio.run(client.close())


def test_torch_is_not_imported_by_who_hands_over_none(serving, path):
    program = (
        "import sys, numpy as np; from normserve.client import Client\n"
        f"client = Client('unix://{path}'); x = client.empty((4, 8)); x[:] = 1\n"
        "assert (client.layer_norm(x).y == 0).all(); client.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def _in_child(path, results):
    results.put(float(CLIENTS[0].layer_norm(np.ones((2, 8), np.float32), bias=np.full(8, 9, np.float32)).y[0, 0]))


CLIENTS: list[Client] = []


def test_a_forked_process_has_a_connection_of_its_own(serving, path):
    with Client(f"unix://{path}") as client:
        y = client.layer_norm(np.ones((2, 8), np.float32), bias=np.full(8, 5, np.float32)).y
        CLIENTS[:] = [client]
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_in_child, args=(path, results))
        child.start()
        assert results.get(timeout=20) == 9
        child.join(20)
        assert (y == 5).all()
        assert client.layer_norm(np.ones((2, 8), np.float32)).y.shape == (2, 8)


def test_no_server_is_one_clear_error(tmp_path):
    with Client(f"unix://{tmp_path}/nobody", retries=ONCE) as client, pytest.raises(ConnectionFailedError):
        client.info()
    with pytest.raises(ValueError, match="unix://PATH"):
        Client("unix://")


def test_keys_are_asked_for(launched, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keyed.sock"
    launched("--local", str(path), env={"NORMSERVE_API_KEY": "secret"})
    x = np.ones((2, 8), np.float32)
    with Client(f"unix://{path}", api_key="secret") as client:
        assert client.layer_norm(x).y.shape == (2, 8)
    for key in (None, "wrong"):
        with Client(f"unix://{path}", api_key=key) as client, pytest.raises(UnauthorizedError) as caught:
            client.layer_norm(x)
        assert "secret" not in str(caught.value)


def test_the_program_of_the_sidecar_example_computes(serving, path):
    file = Path(__file__).parents[4] / "docker/k8s/sidecar/client.py"
    environment = os.environ | {"NORMALISE_AT": f"unix://{path}"}
    program = subprocess.Popen([sys.executable, file], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert re.fullmatch(r"[0-9.]+ GB/s, deviation 1\.000\n", program.stdout.readline())
        program.terminate()
        assert program.wait(10) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_the_access_log_has_a_line_for_each_message(launched, tmp_path, until):
    path = tmp_path / "n.sock"
    server = launched("--local", str(path), "--access-log", "--log-format", "json")
    x = np.ones((2, 8), np.float32)
    with Client(f"unix://{path}") as client:
        client.layer_norm(x)
        with pytest.raises(InvalidRequestError):
            client.rms_norm(x, weight=np.ones(3, np.float32))

    def noted():
        said = [json.loads(line) for line in server.lines if '"normserve.access"' in line]
        return [each for each in said if each.get("method") == "local"]

    until(lambda: len(noted()) == 4)
    found = {each["path"]: each for each in noted()}
    assert found.keys() == {"hello", "grow", "layer_norm/forward", "rms_norm/forward"}
    assert (found["layer_norm/forward"]["status"], found["rms_norm/forward"]["status"]) == (200, 422)
    computed = found["layer_norm/forward"]
    assert (computed["received_bytes"], computed["address"]) == (x.nbytes, f"uid {os.getuid()}")
