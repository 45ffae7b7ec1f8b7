"""Where the memory of a body is made."""

import asyncio
import threading
from dataclasses import replace

import pytest
from normserve.admission.permits import AdmissionBudget
from normserve.errors import NotReadyError, OverloadedError, RequestTimeoutError
from normserve.http.body_reader import BodyReader
from normserve.http.transport import IncomingBody as RealReception
from normserve.memory.slabs import PLAIN, SlabAllocator, SlabPool, allocate_plain

from tests.service.http.fake_exchanges import ExchangeScene, make_exchange

MIB = 2**20


class Reception:
    """Asks for memory for all that was announced."""

    def __init__(self, announced: int) -> None:
        self.content_length = announced

    is_complete = True

    def require_not_aborted(self):
        """It is."""

    async def receive_into(self, make_room, **how_slow):
        return make_room(self.content_length)[: self.content_length]


class CutOff(Reception):
    """Was ended before anybody asked for it."""

    def require_not_aborted(self):
        raise RequestTimeoutError("too slow")


@pytest.fixture
def slabs():
    return SlabPool(max_idle_bytes=64 * MIB)


@pytest.fixture
def made_on(slabs):
    """The threads that make slabs."""
    threads = []

    def allocate(nbytes):
        threads.append(threading.current_thread())
        return allocate_plain(nbytes)

    slabs.source = replace(PLAIN, allocate=allocate)
    return threads


class Chunked:
    """Outgrows the memory that it was given twice."""

    content_length = None
    is_complete = True

    def require_not_aborted(self):
        """It is."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    async def receive_into(self, make_room, **how_slow):
        for share in (8, 4):
            make_room(self.nbytes // share)
        room = make_room(self.nbytes)
        room[: self.nbytes] = bytes(range(256)) * (self.nbytes // 256)
        return room[: self.nbytes]


def read(slabs: SlabPool, nbytes: int, reception: type = Reception) -> memoryview:
    reader = BodyReader(slabs, 64 * MIB, 5.0, 5.0)
    exchange = make_exchange(AdmissionBudget(max_requests=4, max_bytes=64 * MIB), reception(nbytes))
    return asyncio.run(reader.admit_and_receive_body(exchange))


def test_memory_that_takes_long_to_make_is_made_beside_the_loop(slabs, made_on):
    slabs.source = replace(slabs.source, is_slow=True)
    assert len(read(slabs, 8 * MIB)) == 8 * MIB
    assert made_on[0] is not threading.current_thread()
    # It has come home by now, and nobody need make another.
    read(slabs, 8 * MIB)
    assert len(made_on) == 1
    assert slabs.used_bytes == 0


@pytest.mark.parametrize(("is_slow", "nbytes"), [(False, 8 * MIB), (True, 100_000)])
def test_memory_that_is_there_at_once_is_made_here(slabs, made_on, is_slow, nbytes):
    slabs.source = replace(slabs.source, is_slow=is_slow)
    assert len(read(slabs, nbytes)) == nbytes
    assert made_on == [threading.current_thread()]


@pytest.mark.parametrize("is_slow", [False, True])
def test_no_memory_is_to_come_back_later(slabs, is_slow):
    def nothing_left(nbytes):
        raise MemoryError

    slabs.source = SlabAllocator(nothing_left, sizes_per_doubling=4, is_slow=is_slow)
    with pytest.raises(OverloadedError):
        read(slabs, 8 * MIB)
    assert slabs.used_bytes == 0


def test_a_body_that_was_cut_off_before_needs_no_permit(slabs):
    reader = BodyReader(slabs, 64 * MIB, 5.0, 5.0)
    exchange = make_exchange(AdmissionBudget(max_requests=0, max_bytes=0), CutOff(8 * MIB))
    with pytest.raises(RequestTimeoutError):
        asyncio.run(reader.admit_and_receive_body(exchange))
    assert exchange.permit is None


class TestChunkedBodies:
    @pytest.mark.parametrize("nbytes", [512 * 1024, 8 * MIB])
    def test_slow_memory_is_made_once_and_of_the_length_that_came(self, slabs, made_on, nbytes):
        slabs.source = replace(slabs.source, is_slow=True)
        body = read(slabs, nbytes, Chunked)
        assert bytes(body) == bytes(range(256)) * (nbytes // 256)
        assert len(made_on) == 1
        assert (made_on[0] is threading.current_thread()) == (nbytes < MIB)
        assert slabs.used_bytes == nbytes
        del body
        assert slabs.used_bytes == 0

    def test_short_ones_need_none(self, slabs, made_on):
        slabs.source = replace(slabs.source, is_slow=True)
        assert len(read(slabs, 64 * 1024, Chunked)) == 64 * 1024
        assert made_on == []

    def test_quick_memory_is_made_as_they_grow(self, slabs, made_on):
        body = read(slabs, 8 * MIB, Chunked)
        assert bytes(body) == bytes(range(256)) * (8 * MIB // 256)
        assert set(made_on) == {threading.current_thread()}
        assert slabs.used_bytes >= 8 * MIB


@pytest.mark.parametrize("announced", [16 * MIB, None])
def test_a_body_that_stalls_gives_its_place_and_its_memory_to_the_next_at_once(slabs, announced):
    now = [0.0]
    limits = AdmissionBudget(max_requests=1, max_bytes=16 * MIB, clock=lambda: now[0])
    reader = BodyReader(slabs, 16 * MIB, 60.0, 60.0, min_bytes_per_s=4096, grace_s=60.0)

    async def stall() -> None:
        stalls = RealReception(announced, lambda: bytearray(b"first"))
        exchange = make_exchange(limits, stalls)
        reading = asyncio.ensure_future(reader.admit_and_receive_body(exchange))
        await asyncio.sleep(0)
        assert slabs.used_bytes > 0
        now[0] += 2
        limits.acquire(8 * MIB, "10.0.0.1")
        assert (limits.request_count, limits.used_bytes, slabs.used_bytes) == (1, 8 * MIB, 0)
        with pytest.raises(RequestTimeoutError):
            await reading

    asyncio.run(stall())


def reader(slabs: SlabPool) -> BodyReader:
    return BodyReader(slabs, MIB, max_pause_s=5, max_total_s=5)


def test_no_body_is_received_before_the_server_is_ready(slabs):
    async def run():
        asked = ExchangeScene()
        with pytest.raises(NotReadyError):
            await reader(slabs).receive_body_and_mark_in_progress(asked.exchange)
        assert asked.limits.request_count == 0
        assert asked.exchange.permit is None
        assert asked.progress.is_idle

    asyncio.run(run())


def test_work_begins_once_the_body_is_whole(slabs):
    async def run():
        asked = ExchangeScene()
        await asked.start()
        assert bytes(await reader(slabs).receive_body_and_mark_in_progress(asked.exchange)) == b""
        record = asked.exchange.record
        assert (record.stage_seconds["recv"], record.current_stage) == (
            asked.exchange.incoming_body.receive_s,
            "parse",
        )
        assert not asked.progress.is_idle
        assert asked.limits.request_count == 1

    asyncio.run(run())
