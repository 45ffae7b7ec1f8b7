"""The client's allocator: places never overlap, everything comes back, and what comes again lies where it lay."""

import gc
import random
import threading

import numpy as np
from normserve.client.local.allocator import HostArena

from tests.service.client.local.arenas import SEGMENT, arena

__all__ = ["arena"]


def test_blocks_never_overlap_and_all_of_them_come_back(arena):
    choose = random.Random(0)
    held: dict[int, tuple[np.ndarray, int]] = {}
    before = []
    refused = again = 0
    for step in range(4000):
        if held and choose.random() < 0.5:
            block, mark = held.pop(choose.choice(list(held)))
            assert (block == mark).all()
            del block
            continue
        if before and choose.random() < 0.5:
            blocks = arena.allocate_at([choose.choice(before)])
            again += blocks is not None
            block = blocks and blocks.pop()
        else:
            block = arena.allocate(choose.choice([1, 64, 100, 5000, 20_000]))
        if block is None:
            refused += 1
            continue
        before = [*before[-20:], block.segment_range]
        assert block.segment_range.offset % 64 == 0
        mark = step % 251
        block[:] = mark
        held[step] = block, mark
    assert refused
    assert again
    held.clear()
    block = None
    gc.collect()
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    assert {block.segment_range.segment for block in whole} == {3, 7}
    assert arena.allocate(1) is None


def test_once_empty_is_told_once_by_whoever_returns_the_last_block(arena):
    told = []
    held = [arena.allocate(256) for _ in range(100)]
    arena.call_when_empty(lambda: told.append(1))
    threads = [threading.Thread(target=lambda: [held.pop() for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert told == [1]
    other = HostArena()
    other.call_when_empty(lambda: told.append(2))
    assert told == [1, 2]


def test_the_next_block_of_a_size_is_the_lowest_free_one(arena):
    blocks = [arena.allocate(100) for _ in range(4)]
    places = [block.segment_range for block in blocks]
    del blocks[1]
    del blocks[0]
    gc.collect()
    assert arena.allocate(64).segment_range not in places
    assert arena.allocate(128).segment_range == places[0]
    taken = [arena.allocate(128) for _ in range(2)]
    assert [block.segment_range for block in taken] == places[:2]


def test_blocks_can_be_had_again_where_they_were(arena):
    held = arena.allocate_all((100, 5000, 64))
    places = [block.segment_range for block in held]
    assert arena.allocate_at(places) is None
    kept = held.pop()
    del held[:]
    gc.collect()
    # One of them is in use; the others are free as before.
    assert arena.allocate_at(places) is None
    again = arena.allocate_at(places[:2])
    assert [block.segment_range for block in again] == places[:2]
    again[1][:] = 7
    assert (kept == 0).all()
    del again, kept
    gc.collect()
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    assert arena.allocate_at(places) is None
    del whole
    gc.collect()
    # Within what is free, whatever lay around it.
    assert [block.segment_range for block in arena.allocate_at(places[1:])] == places[1:]


def test_places_that_others_overlap_are_not_free(arena):
    (block,) = arena.allocate_all((1024,))
    place = block.segment_range
    del block
    gc.collect()
    small = arena.allocate(64)
    assert small.segment_range.offset == place.offset
    assert arena.allocate_at([place]) is None
    del small
    gc.collect()
    assert arena.allocate_at([place]) is not None


def test_steps_that_free_their_blocks_in_any_order_use_the_same_places(arena):
    choose = random.Random(0)
    kept: list[np.ndarray] = []
    seen = set()
    for _ in range(300):
        forward = [arena.allocate(nbytes) for nbytes in (8192, 64, 64)]
        backward = [arena.allocate(nbytes) for nbytes in (8192, 512, 512)]
        seen.add(tuple(block.segment_range for block in (*forward, *backward)))
        freed = forward + kept
        forward, kept = [], backward
        choose.shuffle(freed)
        while freed:
            del freed[-1]
    # Gradients of one step are alive while the next one computes its own.
    assert len(seen) <= 3


def test_blocks_that_wait_for_their_size_are_there_for_larger_ones(arena):
    sizes = [64 * (1 + index) for index in range(16)]
    held = [arena.allocate(size) for size in sizes]
    held += [arena.allocate(SEGMENT) for _ in range(1)]
    assert len({block.segment_range for block in held}) == 17
    held.clear()
    gc.collect()
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    assert {block.segment_range.segment for block in whole} == {3, 7}


def test_segments_without_a_place_in_use_are_released(arena):
    kept = arena.allocate(64)
    place = arena.allocate(SEGMENT).segment_range
    assert [kept.segment_range.segment, place.segment] == [3, 7]
    assert arena.allocate_at([place]) is not None
    gc.collect()
    assert arena.remove_idle_segments() == [7]
    assert (arena.segment_numbers, arena.nbytes) == ([3], SEGMENT)
    # A call that is made again looks for its places of before.
    assert arena.allocate_at([place]) is None
    assert arena.allocate_at([kept.segment_range, place]) is None
    del kept
    gc.collect()
    assert arena.allocate(SEGMENT).segment_range.segment == 3
    assert arena.remove_idle_segments() == [3]
    assert arena.allocate(1) is None
