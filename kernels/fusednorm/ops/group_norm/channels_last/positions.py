"""Whole positions of channels-last samples, as the kernels that stream them take them.

A tile is [LANES, VEC], a lane for each thread and VEC neighbouring columns (channels), a vector, what it loads at
once.  `units` lanes side by side are all columns of a position, the next ones those of the next position.  A lane
keeps its columns for all positions.

Lanes that are too few for one more position idle: they share the place of the last one's.
"""

import triton
import triton.language as tl


@triton.jit
def places(units, LANES: tl.constexpr, VEC: tl.constexpr):
    """Each lane's position, [LANES, 1], its columns, [LANES, VEC], and the positions of a tile."""
    lane = tl.arange(0, LANES)[:, None]
    positions = LANES // units
    position = tl.minimum(lane // units, positions - 1)
    return position, (lane % units) * VEC + tl.arange(0, VEC)[None, :], positions


@triton.jit
def turns_of(split, hw, splits, step):
    """How many steps of `step` positions a split takes of a sample, and the positions of the last of them."""
    steps = tl.cdiv(hw, step)
    turns = tl.cdiv(steps - split, splits)
    return turns, tl.minimum(hw - (split + (turns - 1) * splits) * step, step)


@triton.jit
def load_positions(
    ptr, start, column, c, position, positions, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles of positions of c columns from ptr + start on, as they lie in memory; none where ptr is None.

    Unless they are WHOLE, `left` positions exist, 1 or more, and the last one stands for those that do not.
    Nothing is masked: ptxas puts a masked load behind the arithmetic of the one before it.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            if WHOLE:
                at = start + i * (positions * c) + (position * c + column)
            else:
                at = start + tl.minimum(position + i * positions, left - 1) * c + column
            tiles = tiles + (tl.load(ptr + at, eviction_policy=EVICT),)
    return tiles


@triton.jit
def position_mask(position, positions, left, i: tl.constexpr, WHOLE: tl.constexpr):
    """Which lanes' positions of tile i exist, [LANES, 1]; a constant mask is dropped."""
    if WHOLE:
        return tl.full(position.shape, True, tl.int1)
    else:
        return position + i * positions < left


@triton.jit
def stored_mask(position, positions, units, left, i: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr):
    """Which lanes' positions of tile i exist and are no idle lane's."""
    mask = position_mask(position, positions, left, i, WHOLE)
    if IDLE:
        mask = mask & (tl.arange(0, position.shape[0])[:, None] < positions * units)
    return mask
