"""Slabs that other processes map: found by where bytes lie, gone with their last view."""

import gc
import os

import numpy as np
import pytest
from normserve.memory.host_segments import PAGE_BYTES, map_segment
from normserve.memory.shared_slabs import SharedSlabRegistry
from normserve.memory.slabs import SlabPool

MIB = 2**20


@pytest.fixture
def shared():
    return SharedSlabRegistry()


@pytest.fixture
def pool(shared):
    return SlabPool(max_idle_bytes=0, source=shared.make_allocator())


def test_bytes_are_found_by_who_maps_the_memory(shared, pool):
    slab = pool.borrow(MIB)
    slab[1000:1004] = b"here"
    located = shared.locate(slab[1000:1004])
    theirs = map_segment(os.dup(located.slab.descriptor), is_populated=False)
    assert theirs[located.offset : located.offset + 4] == b"here"
    theirs[located.offset : located.offset + 4] = b"back"
    assert bytes(slab[1000:1004]) == b"back"


def test_results_that_lie_within_a_slab_are_found_whatever_they_are(shared, pool):
    slab = pool.borrow(MIB)
    y = np.frombuffer(slab, np.float32)[16:32].reshape(4, 4)
    assert shared.locate(memoryview(y).cast("B")).offset == 64


def test_each_has_a_number_of_its_own(shared, pool):
    slabs = [pool.borrow(MIB) for _ in range(5)]
    located = [shared.locate(slab) for slab in slabs]
    assert len({each.slab.number for each in located}) == 5
    assert {each.offset for each in located} == {0}


def test_other_memory_is_not_found(shared, pool):
    slab = pool.borrow(MIB)
    assert shared.locate(memoryview(bytearray(10))) is None
    assert shared.locate(memoryview(np.zeros(4 * MIB, np.uint8))) is None
    assert shared.locate(slab) is not None


def test_what_ends_is_told_once_and_its_descriptor_closed(shared, pool):
    slab = pool.borrow(MIB)
    memory = shared.locate(slab).slab
    assert shared.take_freed_numbers() == []
    os.fstat(memory.descriptor)
    del slab
    # The pool keeps nothing that is idle.
    kept = pool.borrow(2 * MIB)
    gc.collect()
    assert shared.take_freed_numbers() == [memory.number]
    assert shared.take_freed_numbers() == []
    assert shared.locate(kept).slab.number != memory.number


def test_slabs_that_come_again_are_the_same_memory(shared):
    pool = SlabPool(max_idle_bytes=8 * MIB, source=shared.make_allocator())
    numbers = set()
    for _ in range(5):
        slab = pool.borrow(MIB)
        numbers.add(shared.locate(slab).slab.number)
        del slab
    assert len(numbers) == 1


def test_pages_come_when_they_are_written_to(shared, pool):
    slab = pool.borrow(64 * MIB)
    descriptor = shared.locate(slab).slab.descriptor
    assert os.fstat(descriptor).st_blocks * 512 < MIB
    slab[0] = slab[32 * MIB] = 1
    assert os.fstat(descriptor).st_blocks * 512 <= 16 * PAGE_BYTES
