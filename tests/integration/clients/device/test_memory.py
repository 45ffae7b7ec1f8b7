"""Memory of the server's GPU that clients share: what is copied, waited for, given back; needs a GPU."""

import gc
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from normserve.client import Client, OverloadedError, TooLargeError
from torch import nn

from tests.integration.clients.device.serving import ONCE, START_S, metric, random

pytestmark = pytest.mark.gpu

MIB = 2**20


CLIENT = """
    import sys, torch
    from normserve.client import Client
    client = Client("unix://" + sys.argv[1])
    x = client.empty((4096, 1024), device="cuda").fill_(3)
    client.layer_norm(x)
    print("ready", flush=True)
    while True:
        client.layer_norm(x)
"""


def test_nothing_is_copied_of_what_lies_there(serving, local):
    x = local.empty((512, 1024), torch.float32, device="cuda")
    x.normal_()
    weight = local.empty((1024,), device="cuda").fill_(2)
    arena = local._transport._connection.protocol._device_offer._arena
    copied = [metric(serving, "transfer_bytes_total", f'direction="{way}"') for way in ("in", "out")]
    taken = arena._allocated_count
    y = local.layer_norm(x, weight).y
    assert arena._allocated_count == taken + 1
    assert arena.locate_tensor(y) is not None
    torch.testing.assert_close(y, 2 * nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)
    assert [metric(serving, "transfer_bytes_total", f'direction="{way}"') for way in ("in", "out")] == copied
    again = local.layer_norm(y).y
    torch.testing.assert_close(again, nn.functional.layer_norm(y, (1024,)), rtol=1e-5, atol=1e-5)
    del y, again
    gc.collect()
    assert arena._allocate_ranges((1,)) is not None


def test_what_the_stream_still_writes_is_waited_for(local):
    x = local.empty((256, 1024), device="cuda").zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    x.copy_(torch.arange(1024.0, device="cuda").expand(256, 1024))
    y = local.layer_norm(x).y
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (1024,)), rtol=1e-5, atol=1e-5)


def test_a_place_is_not_used_again_while_a_stream_reads_it(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        ones = torch.ones(256, 1024, device="cuda")
        kept = torch.empty(256, 1024, device="cuda")
        side = torch.cuda.Stream()
        sevens, nines = (torch.full((1024,), value, device="cuda") for value in (7.0, 9.0))
        # So many that no segment is mapped later, which may wait for all work of this process.
        several = [client.layer_norm(ones, bias=nines).y for _ in range(8)]
        y = client.layer_norm(ones, bias=sevens).y
        address = y.data_ptr()
        del several
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            # Some seconds: longer than the calls take while other processes use the GPU.
            torch.cuda._sleep(10_000_000_000)
            kept.copy_(y)
            # Its last view dies where it is read.
            del y
        others = [client.layer_norm(ones, bias=nines).y for _ in range(3)]
        assert not side.query(), "the calls took longer than the stream, so that this test shows nothing"
        assert address not in [other.data_ptr() for other in others]
        arena = client._transport._connection.protocol._device_offer._arena
        assert side.stream_id in [number for _, (number, *_) in arena._pending_returns]
        torch.cuda.synchronize()
        assert (kept == 7).all()
        client.layer_norm(ones)
        assert side.stream_id not in [number for _, (number, *_) in arena._pending_returns]


def test_a_client_that_is_killed_leaves_nothing_behind(serving, path, local, until, settled):
    x = random(64, 1024)
    right = local.layer_norm(x).y.clone()
    gc.collect()
    before = settled(lambda: metric(serving, "local_device_bytes"))
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            assert metric(serving, "local_device_bytes") > before
            for _ in range(50):
                assert torch.equal(local.layer_norm(x).y, right)
            client.send_signal(signal.SIGKILL)
        until(lambda: metric(serving, "local_device_bytes") == before)
        assert torch.equal(local.layer_norm(x).y, right)


def test_memory_that_is_had_again_is_cleared_and_charged_once(serving, path, until):
    charged = []
    for _ in range(6):
        client = Client(f"unix://{path}", retries=ONCE)
        made = client.empty((100, MIB // 4), device="cuda")
        assert not made.any()
        made.fill_(5)
        charged.append(metric(serving, "local_device_bytes"))
        del made
        client.close()
    # Closed or not, it is charged until the process ends.
    assert len(set(charged)) == 1
    assert metric(serving, "local_device_bytes") == charged[0]


def test_the_quota(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        with pytest.raises(TooLargeError, match="local_device_bytes"):
            client.empty((513, MIB // 4), device="cuda")
        held = [client.empty((64, MIB // 4), device="cuda") for _ in range(4)]
        with pytest.raises(OverloadedError, match="local_device_bytes"):
            held += [client.empty((400, MIB // 4), device="cuda")]
        # The error's traceback would keep what a frame of its own held, beyond the client.
        held.clear()
        assert client.empty((64, MIB // 4), device="cuda").nbytes == 64 * MIB


def test_results_outlive_the_server(start_server, tmp_path):
    path = tmp_path / "own.sock"
    server = start_server("--backend", "triton", "--local", str(path), wait=False)
    server.wait_until_ready(START_S)
    client = Client(f"unix://{path}", retries=ONCE)
    y = client.layer_norm(torch.ones(64, 1024, device="cuda"), bias=torch.full((1024,), 3.0, device="cuda")).y
    server.stop()
    assert (y == 3).all()
    client.close()
    assert (y + 1 == 4).all()
