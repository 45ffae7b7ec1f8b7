"""Tensors between regions and slabs."""

import asyncio
import os
import threading

import pytest
from normserve.errors import OverloadedError, StorageError, UnusableRegionError
from normserve.http.oip.region_tensors import RegionTransfer
from normserve.http.oip.regions.file_regions import SharedMemoryFolder
from normserve.http.oip.regions.region_registry import RegionRange, RegionRegistry
from normserve.memory.slabs import SlabAllocator, SlabPool, allocate_plain

MIB = 2**20


@pytest.fixture
def span(tmp_path):
    folder = SharedMemoryFolder("ns-", tmp_path)

    def make(content: bytes, name: str = "ns-a") -> RegionRange:
        (tmp_path / name).write_bytes(content)
        regions = RegionRegistry(folder, 2**40)
        regions.register_region(None, "r", regions.open_file_region("r", name, 0, len(content)))
        return regions.find_range(None, "r", 0, len(content))

    yield make
    folder.close()


@pytest.fixture
def slabs():
    return SlabPool(max_idle_bytes=0)


@pytest.mark.parametrize("nbytes", [1, 1000, MIB, 33 * MIB + 5], ids=str)
def test_parts_come_into_one_slab_and_go_back(span, slabs, nbytes, tmp_path):
    first, second = os.urandom(nbytes), os.urandom(100)
    transfer = RegionTransfer(slabs)

    async def both_ways() -> list[bytes]:
        spans = [span(first), span(second, "ns-b")]
        places = await transfer.read_ranges(spans)
        read = [bytes(place) for place in places]
        assert 0 < slabs.used_bytes < 2 * nbytes + 200_000
        await transfer.write_ranges([(spans[0], memoryview(second)[: min(nbytes, 100)])])
        return read

    assert asyncio.run(both_ways()) == [first, second]
    assert slabs.used_bytes == 0
    expected = second[: min(nbytes, 100)] + first[100:]
    assert (tmp_path / "ns-a").read_bytes() == expected


def test_what_is_long_is_copied_beside_the_event_loop(span, slabs, monkeypatch):
    threads = []
    of_the_loop = threading.get_ident()

    def note(name):
        original = getattr(os, name)

        def call(*arguments):
            threads.append((name, threading.get_ident() != of_the_loop))
            return original(*arguments)

        monkeypatch.setattr(os, name, call)

    note("preadv")
    note("pwrite")

    async def both_ways(content: bytes) -> None:
        part = span(content)
        [place] = await RegionTransfer(slabs).read_ranges([part])
        await RegionTransfer(slabs).write_ranges([(part, place)])

    asyncio.run(both_ways(bytes(2 * MIB)))
    assert {*threads} == {("preadv", True), ("pwrite", True)}
    threads.clear()
    asyncio.run(both_ways(bytes(4096)))
    assert {*threads} == {("preadv", False), ("pwrite", False)}


@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_a_file_that_shrinks_before_it_is_read_or_written_is_an_error(span, slabs, nbytes, tmp_path):
    part = span(bytes(nbytes))
    os.truncate(tmp_path / "ns-a", 10)

    async def refused(copying) -> str:
        try:
            await copying
        except UnusableRegionError as error:
            return error.detail
        return ""

    transfer = RegionTransfer(slabs)
    assert "become shorter" in asyncio.run(refused(transfer.read_ranges([part])))
    assert slabs.used_bytes == 0
    assert "become 10 bytes" in asyncio.run(refused(transfer.write_ranges([(part, memoryview(bytes(nbytes)))])))


def test_slow_memory_is_made_beside_the_event_loop(span, slabs):
    threads = []

    def allocate(nbytes):
        threads.append(threading.get_ident())
        return allocate_plain(nbytes)

    slabs.source = SlabAllocator(allocate, sizes_per_doubling=1, is_slow=True)
    asyncio.run(RegionTransfer(slabs).read_ranges([span(bytes(2 * MIB))]))
    assert threads
    assert threads[0] != threading.get_ident()


def test_no_memory_for_the_tensors_or_for_the_pages_is_said_so(span, slabs, monkeypatch):
    part = span(bytes(10))

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError):
            asyncio.run(RegionTransfer(slabs).write_ranges([(part, memoryview(b"1"))]))

    def allocate(nbytes):
        raise MemoryError

    slabs.source = SlabAllocator(allocate, sizes_per_doubling=4, is_slow=False)
    with pytest.raises(OverloadedError):
        asyncio.run(RegionTransfer(slabs).read_ranges([part]))
