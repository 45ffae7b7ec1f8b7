"""Whose shared memory there is: charged until its mapping has ended, given back when its process has."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref

import pytest
from normserve.errors import OverloadedError, QuotaExhaustedError, TooLargeError
from normserve.local import client_segments
from normserve.local.client_segments import LEAST_BYTES, HostSegmentAllocator, OrphanedSegments


class Registration:
    """Of a driver."""


def lend(memory: HostSegmentAllocator, uid: int = 7, nbytes: int = 1):
    descriptor, segment = asyncio.run(memory.allocate_segment(uid, nbytes))
    os.close(descriptor)
    return segment


def test_a_user_is_charged_until_the_last_view_is_gone():
    memory = HostSegmentAllocator(3 * LEAST_BYTES)
    kept = [lend(memory), lend(memory, nbytes=2 * LEAST_BYTES)]
    with pytest.raises(OverloadedError, match="local_bytes"):
        lend(memory)
    assert len(lend(memory, uid=8)) == LEAST_BYTES
    view = memoryview(kept.pop())[:1]
    gc.collect()
    assert memory.nbytes == 3 * LEAST_BYTES
    del view
    gc.collect()
    assert memory.nbytes == LEAST_BYTES
    assert len(lend(memory, nbytes=2 * LEAST_BYTES)) == 2 * LEAST_BYTES


def test_what_can_never_be_lent_is_told_apart():
    memory = HostSegmentAllocator(3 * LEAST_BYTES)
    for nbytes in (3 * LEAST_BYTES + 1, 2**63 - 1):
        with pytest.raises(TooLargeError):
            lend(memory, nbytes=nbytes)


def test_a_client_is_told_what_it_holds_itself():
    memory = HostSegmentAllocator(3 * LEAST_BYTES)
    own = [lend(memory, nbytes=2 * LEAST_BYTES)]
    holds = (
        f"^{2 * LEAST_BYTES} more bytes .* local_bytes, {3 * LEAST_BYTES}: .* holds {2 * LEAST_BYTES} in 1 segments"
    )
    with pytest.raises(QuotaExhaustedError, match=holds):
        asyncio.run(memory.allocate_segment(7, 2 * LEAST_BYTES, own))
    other = lend(memory)
    with pytest.raises(OverloadedError):
        asyncio.run(memory.allocate_segment(7, LEAST_BYTES, own))
    del other
    gc.collect()
    # Of another user these are not.
    for uid, nbytes in ((7, LEAST_BYTES), (8, 2 * LEAST_BYTES)):
        os.close(asyncio.run(memory.allocate_segment(uid, nbytes, own))[0])


def test_a_client_that_has_all_segments_of_its_user_is_told_so(monkeypatch):
    monkeypatch.setattr(client_segments, "_MOST_SEGMENTS", 2)
    memory = HostSegmentAllocator(8 * LEAST_BYTES)
    own = [lend(memory), lend(memory)]
    with pytest.raises(QuotaExhaustedError, match=f" holds {2 * LEAST_BYTES} in 2 segments \\(of 2 at most\\)"):
        asyncio.run(memory.allocate_segment(7, 1, own))
    with pytest.raises(OverloadedError):
        asyncio.run(memory.allocate_segment(7, 1, own[:1]))


def test_what_fails_is_not_charged():
    def refuse(memory: memoryview) -> object:
        raise MemoryError("injected")

    memory = HostSegmentAllocator(LEAST_BYTES, refuse)
    for _ in range(3):
        with pytest.raises(OverloadedError, match="no shared memory"):
            lend(memory)
        gc.collect()
    assert memory.nbytes == 0


def test_the_driver_forgets_memory_before_it_goes():
    made: list[weakref.ref[Registration]] = []

    def share(memory: memoryview) -> Registration:
        registration = Registration()
        made.append(weakref.ref(registration))
        return registration

    segment = lend(HostSegmentAllocator(LEAST_BYTES, share))
    assert made[0]() is not None
    del segment
    gc.collect()
    assert made[0]() is None


def test_what_is_left_over_is_given_back_once_its_process_has_ended():
    async def check():
        memory, leftovers = HostSegmentAllocator(4 * LEAST_BYTES), OrphanedSegments()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            for _ in range(2):
                descriptor, segment = await memory.allocate_segment(7, 1)
                os.close(descriptor)
                leftovers.retain_segments(process.pid, os.pidfd_open(process.pid), [segment])
            del segment
            await asyncio.sleep(0.05)
            assert (len(leftovers), memory.nbytes) == (2, 2 * LEAST_BYTES)
            process.stdin.close()
            while memory.nbytes:
                await asyncio.sleep(0.01)
        assert len(leftovers) == 0

    asyncio.run(asyncio.wait_for(check(), 20))


def test_what_is_given_back_reads_as_zeros_for_whoever_maps_it():
    async def check():
        memory = HostSegmentAllocator(LEAST_BYTES)
        descriptor, segment = await memory.allocate_segment(7, 1)
        from normserve.memory.host_segments import map_segment

        theirs = map_segment(descriptor)
        os.close(descriptor)
        theirs[3] = 9
        segments = [segment]
        del segment
        OrphanedSegments().submit_segments_for_freeing(segments)
        while memory.nbytes:
            await asyncio.sleep(0.01)
        assert theirs[3] == 0

    asyncio.run(asyncio.wait_for(check(), 20))
