"""One holder among the tasks of several processes; nobody's thread waits, and everybody has a turn."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
from normserve.layers.process_lock import ProcessLock

HOLDS = """
import asyncio, sys
from pathlib import Path
from normserve.layers.process_lock import ProcessLock

async def hold():
    async with ProcessLock(Path(sys.argv[1])).hold(None):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_one_at_a_time(tmp_path):
    inside = []

    async def change(lock: ProcessLock) -> None:
        async with lock.hold(10):
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0.001)
            inside.pop()

    async def play() -> None:
        # Two of them are to one another as two processes are.
        locks = [ProcessLock(tmp_path), ProcessLock(tmp_path)]
        await asyncio.gather(*(change(locks[index % 2]) for index in range(20)))

    asyncio.run(play())


def test_a_process_with_many_changes_leaves_turns_to_others(tmp_path):
    order = []

    async def change(lock: ProcessLock, who: str) -> None:
        async with lock.hold(10):
            order.append(who)
            await asyncio.sleep(0.001)

    async def play() -> None:
        busy, other = ProcessLock(tmp_path), ProcessLock(tmp_path)
        async with busy.hold(10):
            crowd = [asyncio.create_task(change(busy, "busy")) for _ in range(50)]
            single = asyncio.create_task(change(other, "other"))
            await asyncio.sleep(0.02)
        await asyncio.gather(*crowd, single)

    asyncio.run(play())
    # It had the turn; the others may be as many as they like.
    assert order[0] == "other"


def test_no_thread_waits(tmp_path, holder):
    async def play() -> None:
        before = threading.active_count()
        waiting = [asyncio.create_task(ProcessLock(tmp_path).hold(0.05).__aenter__()) for _ in range(20)]
        await asyncio.sleep(0.02)
        assert threading.active_count() == before
        assert all(
            isinstance(each, TimeoutError) for each in await asyncio.gather(*waiting, return_exceptions=True)
        )

    asyncio.run(play())


def test_a_wait_ends_and_leaves_nothing_locked(tmp_path, holder):
    async def play() -> None:
        lock = ProcessLock(tmp_path)
        with pytest.raises(TimeoutError):
            async with lock.hold(0.02):
                pytest.fail("somebody else holds it")
        os.kill(holder.pid, signal.SIGKILL)
        async with lock.hold(10):
            pass
        async with lock.hold(10):
            pass

    asyncio.run(play())


def test_the_lock_of_a_stopped_process_is_waited_for_and_free_once_it_is_killed(tmp_path, holder):
    async def play() -> None:
        os.kill(holder.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(ProcessLock(tmp_path).hold(10).__aenter__())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        os.kill(holder.pid, signal.SIGKILL)
        await waiting

    asyncio.run(play())


def test_a_cancelled_wait_leaves_nothing_locked(tmp_path):
    async def play() -> None:
        lock = ProcessLock(tmp_path)
        async with lock.hold(10):
            waiting = asyncio.create_task(lock.hold(10).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
        async with lock.hold(10), asyncio.timeout(10):
            pass

    asyncio.run(play())
