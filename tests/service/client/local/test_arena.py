"""The client's allocator: blocks never overlap, and everything comes back."""

import gc
import os
import random
import threading

import numpy as np
import pytest
from normserve.client.local.arena import Arena
from normserve.memory.segments import Segment, make_segment

SEGMENT = 2**16


@pytest.fixture
def arena():
    arena = Arena()
    for number in (3, 7):
        descriptor, segment = make_segment(SEGMENT, Segment)
        os.close(descriptor)
        arena.add(number, segment)
    return arena


def test_blocks_never_overlap_and_all_of_them_come_back(arena):
    choose = random.Random(0)
    held: dict[int, tuple[np.ndarray, int]] = {}
    refused = 0
    for step in range(4000):
        if held and choose.random() < 0.5:
            block, mark = held.pop(choose.choice(list(held)))
            assert (block == mark).all()
            del block
            continue
        block = arena.take(choose.choice([1, 64, 100, 5000, 20_000]))
        if block is None:
            refused += 1
            continue
        assert block.place.offset % 64 == 0
        mark = step % 251
        block[:] = mark
        held[step] = block, mark
    assert refused
    held.clear()
    block = None
    gc.collect()
    whole = [arena.take(SEGMENT) for _ in range(2)]
    assert {block.place.segment for block in whole} == {3, 7}
    assert arena.take(1) is None


def test_a_block_stays_while_any_view_of_it_does(arena):
    whole = [arena.take(SEGMENT) for _ in range(2)]
    view = np.frombuffer(whole.pop().data, np.float32)[5:6]
    gc.collect()
    assert arena.take(1) is None
    del view
    gc.collect()
    assert arena.take(1) is not None


def test_it_knows_what_lies_in_it(arena):
    block = arena.take(1000)
    assert arena.locate(block.data) == (block.place.segment, block.place.offset)
    assert arena.locate(block.data[64:]) == (block.place.segment, block.place.offset + 64)
    assert arena.locate(memoryview(bytearray(1000))) is None


def test_once_empty_is_told_once_by_whoever_returns_the_last_block(arena):
    told = []
    held = [arena.take(256) for _ in range(100)]
    arena.once_empty(lambda: told.append(1))
    threads = [threading.Thread(target=lambda: [held.pop() for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert told == [1]
    other = Arena()
    other.once_empty(lambda: told.append(2))
    assert told == [1, 2]


def test_the_next_block_of_a_size_is_the_lowest_free_one(arena):
    blocks = [arena.take(100) for _ in range(4)]
    places = [block.place for block in blocks]
    del blocks[1]
    del blocks[0]
    gc.collect()
    assert arena.take(64).place not in places
    assert arena.take(128).place == places[0]
    taken = [arena.take(128) for _ in range(2)]
    assert [block.place for block in taken] == places[:2]


def test_steps_that_free_their_blocks_in_any_order_use_the_same_places(arena):
    choose = random.Random(0)
    kept: list[np.ndarray] = []
    seen = set()
    for _ in range(300):
        forward = [arena.take(nbytes) for nbytes in (8192, 64, 64)]
        backward = [arena.take(nbytes) for nbytes in (8192, 512, 512)]
        seen.add(tuple(block.place for block in (*forward, *backward)))
        freed = forward + kept
        forward, kept = [], backward
        choose.shuffle(freed)
        while freed:
            del freed[-1]
    # Gradients of one step are alive while the next one computes its own.
    assert len(seen) <= 3


def test_blocks_that_wait_for_their_size_are_there_for_larger_ones(arena):
    sizes = [64 * (1 + index) for index in range(16)]
    held = [arena.take(size) for size in sizes]
    held += [arena.take(SEGMENT) for _ in range(1)]
    assert len({block.place for block in held}) == 17
    held.clear()
    gc.collect()
    whole = [arena.take(SEGMENT) for _ in range(2)]
    assert {block.place.segment for block in whole} == {3, 7}


@pytest.mark.parametrize(
    "view",
    [
        lambda block: np.ndarray((4, 4), np.float32, block),
        lambda block: np.ndarray((4, 4), np.float32, block)[1:].view("<i4").T[1:],
        lambda block: np.ndarray((4, 4), np.float32, block).data[1:],
        lambda block: block[1:].data,
    ],
)
def test_whatever_is_made_of_a_block_keeps_it(arena, view):
    whole = [arena.take(SEGMENT) for _ in range(2)]
    made = view(whole.pop())
    gc.collect()
    assert arena.take(1) is None
    del made
    gc.collect()
    assert arena.take(1) is not None


def test_a_block_does_not_return_with_a_slice_of_it(arena):
    whole = [arena.take(SEGMENT) for _ in range(2)]
    part = whole[0][:64]
    whole[0][:64] = 1
    assert part.sum() == 64
    del part
    gc.collect()
    assert arena.take(1) is None
