"""Clients whose own CUDA tensors the server reads where they lie; needs a GPU."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from normserve.client import AsyncClient, Client, RetryPolicy
from normserve.codec import local_frames as frames
from normserve.memory.allocations import allocation_of
from normserve.memory.device_segments import Device
from torch import nn

from tests.integration.harness.local_wire import LocalConnection

pytestmark = pytest.mark.gpu

# A cold start compiles every kernel that the configuration foresees.
START_S = 300
ONCE = RetryPolicy(tries=1)
MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("own") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    options = ("--local", str(path), "--local-own-memory", "--max-compiles-per-minute", "600")
    server = launched("--backend", "triton", *options, wait=False)
    server.wait_until_ready(START_S)
    return server


@pytest.fixture
def local(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        yield client


def normalised(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


def own_of(client):
    return client._transport._link._offers._arena.own


def offered(client):
    return len(own_of(client)._offered)


def assert_right(client, x):
    torch.testing.assert_close(client.layer_norm(x).y, normalised(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_those_of_http_to_the_bit(serving, local, dtype):
    x = torch.randn(37, 1024, device="cuda").to(dtype)
    weight, bias = torch.randn(2, 1024, device="cuda")
    with Client(serving.url, retries=ONCE) as http:
        for _ in range(3):
            assert torch.equal(local.layer_norm(x, weight, bias).y, http.layer_norm(x, weight, bias).y)
            got, right = local.layer_norm_backward(x, x, weight), http.layer_norm_backward(x, x, weight)
            assert torch.equal(got.dx, right.dx)
            assert torch.equal(got.dweight, right.dweight)
            x.mul_(-2)


def test_an_allocation_is_offered_once_and_withdrawn_with_its_last_tensor(local):
    # More than the allocator divides: an allocation of its own.
    x = torch.randn(16 * MIB, device="cuda").view(-1, 1024)
    for _ in range(3):
        assert_right(local, x)
        assert_right(local, x[5:100])
    assert offered(local) == 1
    small = torch.randn(4, 64, device="cuda")
    assert_right(local, small)
    assert offered(local) == 2
    del x
    gc.collect()
    assert_right(local, small)
    assert offered(local) == 1
    torch.cuda.empty_cache()
    again = torch.randn(16 * MIB, device="cuda").view(-1, 1024)
    assert_right(local, again)


def test_results_lie_in_the_arena(local):
    x = torch.randn(64, 1024, device="cuda")
    y = local.layer_norm(x).y
    arena = local._transport._link._offers._arena
    assert arena.locate_tensor(y) is not None
    assert arena.locate_tensor(x) is None
    torch.testing.assert_close(local.layer_norm(y).y, normalised(y), rtol=1e-4, atol=1e-4)


def test_work_on_the_stream_is_waited_for(local):
    x = torch.zeros(4096, 1024, device="cuda")
    for value in range(20):
        x.normal_()
        x.add_(value)
        assert_right(local, x)


def test_many_allocations_are_computed_with_and_without_a_copy(local):
    # Of what earlier tests have left torch would make several in one allocation.
    gc.collect()
    torch.cuda.empty_cache()
    tensors = [torch.randn(3 * MIB, device="cuda").view(-1, 1024) for _ in range(80)]
    for _ in range(2):
        for x in tensors:
            assert_right(local, x)
    assert offered(local) == 64


def test_the_asynchronous_client(serving, path):
    async def check():
        async with AsyncClient(f"unix://{path}", retries=ONCE) as client:
            tensors = [torch.randn(257, 1024, device="cuda") for _ in range(8)]
            answers = await asyncio.gather(*[client.layer_norm(x) for x in tensors])
            for x, answer in zip(tensors, answers, strict=True):
                torch.testing.assert_close(answer.y, normalised(x), rtol=1e-5, atol=1e-5)
            assert len(client._transport._link._offers._arena.own._offered) >= 1

    asyncio.run(check())


EXPANDABLE = """
    import logging, sys, torch
    from normserve.client import Client
    logging.basicConfig()
    with Client("unix://" + sys.argv[1]) as client:
        x = torch.randn(64, 1024, device="cuda")
        torch.testing.assert_close(client.layer_norm(x).y, torch.nn.functional.layer_norm(x, (1024,)))
        print(len(client._transport._link._offers._arena.own._offered))
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_without_handles_is_copied(serving, path, setting):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXPANDABLE), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting},
    )
    assert done.stdout.strip() == "0", done.stderr
    assert "are copied into the shared memory" in done.stderr


CLIENT = """
    import sys, torch
    from normserve.client import Client
    client = Client("unix://" + sys.argv[1])
    x = torch.randn(4096, 4096, device="cuda")
    client.layer_norm(x)
    print("ready", flush=True)
    while True:
        client.layer_norm(x)
"""


def test_a_client_that_is_killed_harms_nobody(serving, path, local):
    x = torch.randn(64, 1024, device="cuda")
    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"ready\n"
            client.send_signal(signal.SIGKILL)
        for _ in range(50):
            assert_right(local, x)


@pytest.fixture
def wire(serving, path):
    with LocalConnection(path) as wire:
        yield wire


def test_the_extent_is_what_the_driver_says(wire):
    x = torch.ones(16 * MIB, device="cuda")
    greeting = wire.request(frames.Hello(frames.VERSION)).document["device"]
    assert greeting["own"] is True
    found = allocation_of(Device.find(greeting["uuid"]), x.data_ptr())
    assert found.nbytes >= x.nbytes
    handle = found.handle.hex()
    for nbytes in (0, found.nbytes + 1, 2**40, 2**63 - 1):
        assert wire.request(frames.Own(handle, nbytes)).status == 422
    answer = wire.request(frames.Own(handle, found.nbytes))
    assert answer.status == 200
    reference = frames.Located(answer.opened, found.nbytes, "float32", (4, 16))
    place = frames.Place(answer.opened, 0, 256)
    refused = wire.request(frames.Compute(op="layer_norm", tensors={"x": reference}, results={"y": place}))
    assert refused.status == 422
    for nothing in ("00" * 64, os.urandom(64).hex()):
        assert wire.request(frames.Own(nothing, MIB)).status == 422
    assert wire.request(frames.Info()).status == 200


def test_nothing_of_it_stays_open(serving, path):
    x = torch.randn(16 * MIB, device="cuda").view(-1, 1024)
    for _ in range(100):
        with Client(f"unix://{path}", retries=ONCE) as client:
            y = client.layer_norm(x).y
            assert offered(client) == 1
        torch.testing.assert_close(y, normalised(x), rtol=1e-5, atol=1e-5)
