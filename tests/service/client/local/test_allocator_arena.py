"""Blocks of the host's memory: whatever is made of one keeps it."""

import gc

import numpy as np
import pytest

from tests.service.client.local.arenas import SEGMENT, arena

__all__ = ["arena"]


def test_a_block_stays_while_any_view_of_it_does(arena):
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    view = np.frombuffer(whole.pop().data, np.float32)[5:6]
    gc.collect()
    assert arena.allocate(1) is None
    del view
    gc.collect()
    assert arena.allocate(1) is not None


def test_it_knows_what_lies_in_it(arena):
    block = arena.allocate(1000)
    assert arena.locate(block.data) == (block.segment_range.segment, block.segment_range.offset)
    assert arena.locate(block.data[64:]) == (block.segment_range.segment, block.segment_range.offset + 64)
    assert arena.locate(memoryview(bytearray(1000))) is None


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
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    made = view(whole.pop())
    gc.collect()
    assert arena.allocate(1) is None
    del made
    gc.collect()
    assert arena.allocate(1) is not None


def test_a_block_does_not_return_with_a_slice_of_it(arena):
    whole = [arena.allocate(SEGMENT) for _ in range(2)]
    part = whole[0][:64]
    whole[0][:64] = 1
    assert part.sum() == 64
    del part
    gc.collect()
    assert arena.allocate(1) is None
