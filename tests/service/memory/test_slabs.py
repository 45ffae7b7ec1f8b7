"""Slabs are lent until nobody looks at them, used again, and kept within bounds."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from normserve.memory.slabs import PLAIN, SlabAllocator, SlabPool, allocate_plain, get_slab_memory

MIB = 2**20


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(max_idle_bytes=4 * MIB)


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_slab_comes_back_with_its_last_view(pool):
    slab = pool.borrow(MIB)
    part = slab[10:20]
    tensor = torch.frombuffer(part, dtype=torch.uint8)
    del slab, part
    assert (pool.used_bytes, pool.idle_bytes) == (MIB, 0)
    row = tensor[1:3]
    del tensor
    assert pool.used_bytes == MIB
    del row
    assert (pool.used_bytes, pool.idle_bytes) == (0, MIB)


def test_memory_of_a_view_is_what_was_allocated(pool):
    made = []

    def allocate(nbytes):
        made.append(allocate_plain(nbytes))
        return made[-1]

    pool.source = replace(PLAIN, allocate=allocate)
    assert get_slab_memory(pool.borrow(MIB)[10:20]) is made[0]
    assert get_slab_memory(memoryview(bytearray(4))) is None
    assert get_slab_memory(allocate_plain(4).data) is None


def test_slab_is_used_again(pool):
    slab = pool.borrow(MIB)
    slab[:3] = b"abc"
    where = address(slab)
    del slab
    again = pool.borrow(MIB - 1000)
    assert address(again) == where
    assert bytes(again[:3]) == b"abc"


def test_idle_slab_can_be_had_without_the_risk_of_a_new_one(pool):
    assert pool.borrow_idle(MIB) is None
    assert pool.used_bytes == 0
    slab = pool.borrow(MIB)
    where = address(slab)
    assert pool.borrow_idle(MIB) is None
    del slab
    again = pool.borrow_idle(MIB)
    assert address(again) == where
    assert (pool.used_bytes, pool.idle_bytes) == (MIB, 0)
    del again
    assert (pool.used_bytes, pool.idle_bytes) == (0, MIB)


def test_whether_a_slab_is_idle_is_known_without_borrowing_it(pool):
    assert not pool.has_idle(MIB)
    slab = pool.borrow(MIB)
    assert not pool.has_idle(MIB)
    del slab
    assert pool.has_idle(MIB)
    assert pool.has_idle(MIB - 100)
    assert not pool.has_idle(4 * MIB)
    assert (pool.used_bytes, pool.idle_bytes) == (0, MIB)


def test_two_borrowers_never_share(pool):
    slabs = [pool.borrow(MIB) for _ in range(4)]
    for index, slab in enumerate(slabs):
        slab[:] = bytes([index]) * MIB
    assert [(slab[0], slab[-1]) for slab in slabs] == [(index, index) for index in range(4)]


def test_what_is_idle_stays_within_bounds_and_the_longest_unused_goes_first(pool):
    small, large = pool.borrow(MIB), pool.borrow(3 * MIB)
    del small
    assert pool.idle_bytes == MIB
    del large
    assert pool.idle_bytes == 4 * MIB
    other = pool.borrow(2 * MIB)
    del other
    assert pool.idle_bytes <= 4 * MIB
    kept = pool.borrow(2 * MIB)
    assert pool.idle_bytes in (0, 2 * MIB)
    assert len(kept) == 2 * MIB


def test_failed_allocation_leaves_no_trace(pool):
    def nothing_left(nbytes):
        raise MemoryError

    pool.source = replace(PLAIN, allocate=nothing_left)
    with pytest.raises(MemoryError):
        pool.borrow(MIB)
    pool.source = PLAIN
    assert (pool.used_bytes, pool.idle_bytes) == (0, 0)


def test_memory_comes_from_whom_it_is_asked_of(pool):
    tensors = []

    def tensor_memory(nbytes):
        tensors.append(torch.zeros(nbytes, dtype=torch.uint8))
        return tensors[-1].numpy()

    pool.source = replace(PLAIN, allocate=tensor_memory)
    slab = pool.borrow(MIB)
    slab[5] = 7
    assert tensors[0][5] == 7
    del slab
    assert pool.idle_bytes == MIB


def test_slabs_may_come_home_on_any_thread(pool):
    def borrow():
        for _ in range(200):
            pool.borrow(MIB)[:1] = b"x"

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.used_bytes == 0
    assert 0 < pool.idle_bytes <= 4 * MIB


@given(st.integers(0, 2**24))
def test_slab_is_large_enough_and_little_larger(nbytes):
    slab = SlabPool(max_idle_bytes=0).borrow(nbytes)
    assert nbytes <= len(slab) <= max(64 * 1024, nbytes * 1.25)


@pytest.mark.parametrize(
    ("nbytes", "slab_bytes"), [(1, 65536), (65537, 131072), (2**24, 2**24), (2**24 + 128, 2**25)]
)
def test_source_of_powers_of_two_is_asked_for_nothing_else(nbytes, slab_bytes):
    pool = SlabPool(max_idle_bytes=2**26)
    pool.source = SlabAllocator(allocate_plain, sizes_per_doubling=1, is_slow=False)
    slab = pool.borrow(nbytes)
    assert len(slab) == pool.used_bytes == slab_bytes
