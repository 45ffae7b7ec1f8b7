"""Whose device memory there is: charged until its process has ended, whatever the client says or does before."""

import asyncio
import gc
import os
import weakref

import pytest
from normserve.errors import InvalidParameterError, OverloadedError, QuotaExhaustedError, TooLargeError
from normserve.local.client_segments import DeviceSegmentAllocator, OrphanedSegments
from normserve.local.local_session import PeerProcess
from normserve.memory.device_segments import DeviceSegment, ShareableDevice

from tests.service.memory.fake_driver import GRANULARITY, FakeDriver

PEER = PeerProcess(os.getpid(), 7)


class Lender:
    """Arenas of three segments, and a client that asks for them."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.device = ShareableDevice(0, self.driver)
        self.arenas = DeviceSegmentAllocator(3 * GRANULARITY, lambda: self.device)
        self.spent, self.leftovers = [], OrphanedSegments()

    async def allocate_segment(self, nbytes: int = 1, peer: PeerProcess = PEER):
        descriptor, segment = await self.arenas.allocate_segment(peer, nbytes, self.spent, self.leftovers)
        os.close(descriptor)
        return segment

    async def end_of_process(self) -> None:
        """What `OrphanedSegments` does when a process has ended."""
        segments = [weakref.ref(each) for each in self.spent]
        self.leftovers.submit_segments_for_freeing([*self.spent])
        self.spent.clear()
        while any(segment() for segment in segments):
            await asyncio.sleep(0.001)


@pytest.fixture
def lender():
    return Lender()


def test_a_user_is_charged_until_the_process_has_ended(lender):
    async def check():
        held = [await lender.allocate_segment(), await lender.allocate_segment(2 * GRANULARITY)]
        with pytest.raises(OverloadedError, match="local_device_bytes"):
            await lender.allocate_segment()
        other = await lender.allocate_segment(peer=PeerProcess(1, 8))
        assert lender.arenas.nbytes == 4 * GRANULARITY
        # Given back, but perhaps still mapped.
        lender.spent += held
        held.clear()
        gc.collect()
        assert lender.arenas.nbytes == 4 * GRANULARITY
        await lender.end_of_process()
        assert lender.arenas.nbytes == GRANULARITY
        assert other.uid == 8
        await lender.allocate_segment(3 * GRANULARITY)

    asyncio.run(check())


def test_a_client_is_told_what_it_holds_itself(lender):
    async def check():
        own = [await lender.allocate_segment(2 * GRANULARITY)]
        for nbytes, refusal in ((2 * GRANULARITY, QuotaExhaustedError), (GRANULARITY, OverloadedError)):
            other = await lender.allocate_segment()
            with pytest.raises(refusal, match="local_device_bytes"):
                await lender.arenas.allocate_segment(PEER, nbytes, lender.spent, lender.leftovers, own)
            del other
            gc.collect()
        # Of another user these are not.
        other = PeerProcess(1, 8)
        os.close((await lender.arenas.allocate_segment(other, 3 * GRANULARITY, [], lender.leftovers, own))[0])

    asyncio.run(check())


def test_what_was_given_back_is_lent_again_to_the_same_process_cleared(lender):
    async def check():
        large, small = await lender.allocate_segment(2 * GRANULARITY), await lender.allocate_segment()
        for segment in (large, small):
            lender.driver.content(segment.address)[:4] = b"kept"
        lender.spent += [large, small]
        again = await lender.allocate_segment()
        assert again is small
        assert lender.driver.content(small.address)[:4] == bytes(4)
        assert await lender.allocate_segment() is large
        assert lender.arenas.nbytes == 3 * GRANULARITY
        assert not lender.spent

    asyncio.run(check())


def test_neither_another_process_nor_another_user_gets_it(lender):
    async def check():
        watch = os.pidfd_open(os.getpid())
        lender.leftovers.retain_segments(PEER.pid, watch, [await lender.allocate_segment(3 * GRANULARITY)])
        with pytest.raises(OverloadedError):
            await lender.allocate_segment(peer=PeerProcess(PEER.pid + 1, PEER.uid))
        stranger = await lender.allocate_segment(peer=PeerProcess(PEER.pid, 8))
        assert len(stranger) == GRANULARITY
        nameless = PeerProcess(0, PEER.uid)
        with pytest.raises(OverloadedError):
            await lender.allocate_segment(peer=nameless)
        assert len(await lender.allocate_segment()) == 3 * GRANULARITY
        lender.leftovers.stop_monitoring()

    asyncio.run(check())


def test_a_launch_that_runs_keeps_the_memory(lender):
    async def check():
        view = (await lender.allocate_segment()).view()[:64]
        gc.collect()
        assert lender.driver.mappings
        assert lender.arenas.nbytes == GRANULARITY
        del view
        # The thread that made it lets go of it a moment later.
        while lender.driver.mappings:
            await asyncio.sleep(0.001)
        assert lender.arenas.nbytes == 0

    asyncio.run(check())


def test_what_can_never_be_lent_is_told_apart(lender):
    for nbytes in (3 * GRANULARITY + 1, 2**63 - 1):
        with pytest.raises(TooLargeError, match="local_device_bytes"):
            asyncio.run(lender.allocate_segment(nbytes))


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemExportToShareableHandle"])
@pytest.mark.parametrize("code", [2, 999])
def test_what_fails_is_not_charged(lender, name, code):
    lender.driver.refusals[name] = code
    for _ in range(4):
        with pytest.raises(OverloadedError, match="no device memory"):
            asyncio.run(lender.allocate_segment())
        gc.collect()
    assert lender.arenas.nbytes == 0
    assert not lender.driver.mappings


def test_what_cannot_be_lent_again_stays_charged(lender):
    async def check():
        lender.spent.append(await lender.allocate_segment(3 * GRANULARITY))
        lender.driver.refusals["cuMemsetD8"] = 1
        with pytest.raises(OverloadedError):
            await lender.allocate_segment()
        assert lender.arenas.nbytes == 3 * GRANULARITY
        assert lender.spent

    asyncio.run(check())


def test_servers_that_lend_none(lender):
    for most_bytes, device in ((0, lender.device), (GRANULARITY, None)):
        arenas = DeviceSegmentAllocator(most_bytes, lambda device=device: device)
        assert arenas.describe_device() is None
        with pytest.raises(InvalidParameterError, match="memory must be host"):
            asyncio.run(arenas.allocate_segment(PEER, 1, [], OrphanedSegments()))
    assert lender.arenas.describe_device() == {"uuid": lender.device.uuid, "bytes": 3 * GRANULARITY}
    assert isinstance(asyncio.run(lender.allocate_segment()), DeviceSegment)
