"""Memory that clients share with a real server: what is copied, what stays, what comes back."""

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from normserve.client import (
    AsyncClient,
    Client,
    OverloadedError,
    RetryPolicy,
    TooLargeError,
)

from tests.garbage_collector import without_collector

ONCE = RetryPolicy(tries=1)


def shared_bytes(serving) -> float:
    import httpx

    text = httpx.get(serving.url + "/metrics", verify=False).text
    (line,) = [line for line in text.splitlines() if line.startswith("normserve_local_bytes ")]
    return float(line.split()[1])


# More than the client of the fixture `local` keeps, and little beside the quota.
KEPT_BYTES = 2**25


@pytest.fixture(autouse=True)
def quota_is_free(serving, until):
    """What the last test left is garbage by now, such as the arrays that the error of a refusal refers to."""
    gc.collect()
    until(lambda: shared_bytes(serving) <= KEPT_BYTES)


def test_a_tensor_in_the_arena_is_not_copied_and_a_result_stays_while_it_is_looked_at(local):
    x = local.empty((300, 1024))
    x[:] = 1.5
    y = local.layer_norm(x, bias=np.full(1024, 7, np.float32)).y
    more = [local.layer_norm(x, bias=np.full(1024, number, np.float32)).y for number in range(3)]
    assert (y == 7).all()
    assert [each[0, 0] for each in more] == [0, 1, 2]
    assert (x == 1.5).all()
    row = y[5]
    del y
    gc.collect()
    local.layer_norm(x)
    assert (row == 7).all()


def test_memory_comes_back_with_the_last_view(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        x = client.empty((2048, 1024))
        x[:] = 1
        # A quota of 256 MiB, and results of 8 MiB.
        for _ in range(40):
            client.layer_norm(x)
        kept = [client.layer_norm(x) for _ in range(15)]
        with pytest.raises(OverloadedError, match="local_bytes"):
            kept += [client.layer_norm(x) for _ in range(20)]
        kept.clear()
        assert client.layer_norm(x).y.shape == x.shape


# Of a quota of 256 MiB; all of them together do not fit beside the last.
SIZES = [*(2**exponent for exponent in range(13)), 25 * 2**10]


def test_segments_that_are_not_used_are_freed_for_a_larger_call(serving, path):
    with Client(f"unix://{path}", retries=ONCE) as client:
        kept = client.layer_norm(np.ones((1, 1024), np.float32), bias=np.full(1024, 5, np.float32)).y
        for rows in SIZES + SIZES[:2]:
            assert client.layer_norm(np.ones((rows, 1024), np.float32)).y.shape == (rows, 1024)
        assert (kept == 5).all()


def test_segments_that_are_not_used_are_freed_for_a_larger_call_of_a_task(serving, path):
    async def run():
        async with AsyncClient(f"unix://{path}", retries=ONCE) as client:
            for rows in SIZES + SIZES[:2]:
                assert (await client.layer_norm(np.ones((rows, 1024), np.float32))).y.shape == (rows, 1024)

    asyncio.run(run())


def test_what_no_quota_allows_is_refused_at_once(local):
    with pytest.raises(TooLargeError):
        local.empty((2**20, 1024))


def test_what_the_client_itself_holds_is_waited_for_as_its_policy_says(serving, path):
    with Client(f"unix://{path}", retries=RetryPolicy(tries=2, first_pause_s=0.01, longest_pause_s=0.01)) as client:
        held = client.empty((40, 2**20))
        for ask in (lambda: client.empty(held.shape), lambda: client.layer_norm(np.ones(held.shape, np.float32))):
            with pytest.raises(OverloadedError) as caught:
                ask()
            assert caught.value.detail.startswith("167772160 more bytes")
            assert "local_bytes, 268435456: this client itself holds 167772160 in 1 segments" in caught.value.detail
            # The client would wait as long as that.
            assert caught.value.retry_after_s is None


class Ring:
    """Holds an array and itself."""

    def __init__(self, array):
        self.array, self.itself = array, self


def test_arrays_that_are_garbage_are_collected_before_a_call_is_refused(serving, path):
    with without_collector(), Client(f"unix://{path}", retries=ONCE) as client:
        kept = [client.empty((8, 2**20)), client.empty((2, 2**20))]
        # In the segment of the second array, which is not freed.
        ring = Ring(client.empty((20, 2**20)))
        rest = client.empty((10, 2**20))
        del ring
        assert client.empty((20, 2**20)).nbytes == 20 * 2**22
        assert len(kept) == 2
        assert rest.shape == (10, 2**20)


PATIENT = RetryPolicy(tries=1000, first_pause_s=0.01, longest_pause_s=0.05)


def test_memory_that_another_thread_releases_is_waited_for(serving, path):
    with Client(f"unix://{path}", retries=PATIENT) as client:
        held = [client.empty((40, 2**20))]
        release = threading.Timer(0.3, held.clear)
        release.start()
        assert client.empty((40, 2**20)).nbytes == 40 * 2**22
        release.join()


def test_memory_that_another_task_releases_is_waited_for(serving, path):
    async def run():
        async with AsyncClient(f"unix://{path}", retries=PATIENT) as client:
            held = [await client.empty((40, 2**20))]
            asyncio.get_running_loop().call_later(0.3, held.clear)
            assert (await client.empty((40, 2**20))).nbytes == 40 * 2**22

    asyncio.run(run())


def test_results_outlive_the_client(serving, path):
    client = Client(f"unix://{path}")
    x = np.full((64, 1024), 2, np.float32)
    y = client.layer_norm(x, bias=np.full(1024, 3, np.float32)).y
    client.close()
    assert (y == 3).all()
    other = Client(f"unix://{path}")
    dropped = other.layer_norm(x, bias=np.full(1024, 4, np.float32)).y
    del other
    gc.collect()
    assert (dropped == 4).all()


def test_a_closed_client_gives_its_memory_back(serving, path, http, until, settled):
    before = settled(lambda: shared_bytes(serving))
    client = Client(f"unix://{path}")
    y = client.layer_norm(np.ones((2**14, 1024), np.float32)).y
    assert shared_bytes(serving) >= before + 2**27
    client.close()
    assert y.shape
    del y
    until(lambda: shared_bytes(serving) == before)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_processes_that_share_neither_processes_nor_ipc(serving, path, until, settled):
    before = settled(lambda: shared_bytes(serving))
    program = (
        "import os, numpy as np; from normserve.client import Client\n"
        f"client = Client('unix://{path}'); x = client.empty((4, 8)); x[:] = 1\n"
        "assert os.getpid() == 1 and (client.layer_norm(x).y == 0).all(); os._exit(0)"
    )
    apart = ["unshare", "--pid", "--ipc", "--fork", sys.executable, "-c", program]
    subprocess.run(apart, check=True, timeout=60)
    # It gave nothing back, and has ended.
    until(lambda: shared_bytes(serving) == before)
