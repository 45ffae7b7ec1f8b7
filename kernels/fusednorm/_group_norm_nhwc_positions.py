"""Whole positions of channels-last samples, as the kernels that stream them walk them.

A tile is [LANES, VEC], a lane for each thread and VEC neighbouring columns (channels), a vector, what it loads at
once.  `units` lanes side by side are all columns of a position, the next ones those of the next position; lanes
that are too few for one more position idle.  A lane keeps its columns for the whole walk.
"""

import triton
import triton.language as tl


@triton.jit
def places(units, LANES: tl.constexpr, VEC: tl.constexpr):
    """Each lane's position, [LANES, 1], its columns, [LANES, VEC], and the positions of a tile."""
    lane = tl.arange(0, LANES)[:, None]
    return lane // units, (lane % units) * VEC + tl.arange(0, VEC)[None, :], LANES // units


@triton.jit
def turns_of(split, hw, splits, step):
    """How many steps of `step` positions a split takes of a sample, and the positions of the last of them."""
    steps = tl.cdiv(hw, step)
    turns = tl.cdiv(steps - split, splits)
    return turns, tl.minimum(hw - (split + (turns - 1) * splits) * step, step)


@triton.jit
def load_positions(
    ptr, start, at, positions, step, left, position,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles from ptr + start on, `step` elements apart, as they lie in memory; none where ptr is None.

    Unless they are WHOLE, positions from `left` on are masked; where some lanes IDLE, these are.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = position_mask(position, positions, left, i, WHOLE, IDLE)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def position_mask(position, positions, left, i: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr):
    """Which lanes of tile i exist, [LANES, 1]; a constant mask is folded away."""
    mask = tl.full(position.shape, True, tl.int1)
    if IDLE:
        mask = position < positions
    if not WHOLE:
        mask = mask & (position + i * positions < left)
    return mask
