"""The memory of one client's connection: how long it stays, and what is left of it."""

import asyncio
import gc
import weakref
from pathlib import Path

import pytest
from normserve.codec import local_messages as frames

from tests.service.engine.fake_engine import turn
from tests.service.local.fake_wire import Client, played
from tests.service.memory.fake_driver import GRANULARITY


def test_what_is_freed_is_not_kept_by_frames_that_are_known():
    async def body(client):
        for offset in range(0, 160, 16):
            client.send(client.compute(offset=offset), offset)
        await client.finish()
        assert client.host_allocator.nbytes > 0
        client.send(frames.FreeSegmentMessage(0))
        while client.host_allocator.nbytes:
            await asyncio.sleep(0.001)
            gc.collect()

    played(body)


def test_a_segment_that_a_request_uses_stays_until_it_is_answered():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        client.send(frames.FreeSegmentMessage(0))
        await turn()
        assert client.host_allocator.nbytes > 0
        await client.finish()
        assert client.statuses() == {1: 200}
        while client.host_allocator.nbytes:
            await asyncio.sleep(0.001)
            gc.collect()

    played(body)


def test_nothing_of_a_connection_that_has_ended_is_kept():
    async def run():
        client = Client()
        await client.start_and_capture_when_due()
        await client.request(frames.GrowArenaMessage(1))
        client.send(client.compute(), 1)
        await client.finish()
        client.wire.close()
        await turn()
        gone = [weakref.ref(client.connection), weakref.ref(client.left[0])]
        del client
        gc.collect()
        assert [ref() for ref in gone] == [None, None]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_segment_that_comes_too_late_is_freed_at_once():
    async def body(client):
        client.send(frames.GrowArenaMessage(2**20), 1)
        client.wire.close()
        await asyncio.sleep(0)
        assert client.host_allocator.nbytes == 2 * 2**20
        while client.host_allocator.nbytes > 2**20:
            await asyncio.sleep(0.001)
        assert client.wire.sent == []
        assert len(client.orphaned_segments) == 0

    played(body)


def test_what_is_freed_may_be_lent_again_at_once():
    async def body(client):
        for number in range(1, 5):
            assert (await client.request(frames.GrowArenaMessage(63 * 2**20))).segment == number
            client.send(frames.FreeSegmentMessage(number))

    played(body)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("pid", [None, 0])
def test_device_memory_that_the_client_had_stays_charged_when_it_leaves_while_it_is_lent_again(fails, pid):
    # What its process has mapped it has still, whatever the driver says of lending it again.
    async def body(client):
        answer = await client.request(frames.GrowArenaMessage(1, "device"))
        client.send(frames.FreeSegmentMessage(answer.segment))
        if fails:
            client.driver.refusals["cuMemsetD8"] = 999
        client.send(frames.GrowArenaMessage(1, "device"), 7)
        await asyncio.sleep(0)
        client.wire.close()
        while not client.orphaned_segments:
            await asyncio.sleep(0.001)
        gc.collect()
        assert client.device_allocator.nbytes == GRANULARITY
        client.orphaned_segments.stop_monitoring()

    played(body, pid=pid)


def test_device_memory_that_a_client_has_freed_is_still_its_own():
    async def body(client):
        for nbytes in (GRANULARITY, 2 * GRANULARITY):
            answer = await client.request(frames.GrowArenaMessage(nbytes, "device"))
            client.send(frames.FreeSegmentMessage(answer.segment))
        # Neither is large enough, and to wait for them is of no use.
        refused = await client.request(frames.GrowArenaMessage(3 * GRANULARITY, "device"))
        assert (refused.status, refused.retry_after_s) == (429, None)

    played(body)


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_growing_leaves_no_descriptor_behind():
    async def body(client):
        before = descriptors()
        for _ in range(3):
            await client.request(frames.GrowArenaMessage(1))
        for _ in range(3):
            assert (await client.request(frames.GrowArenaMessage(2**62))).status == 413
        await turn()
        # Each mapping has one.
        assert descriptors() == before + 3

    played(body)
