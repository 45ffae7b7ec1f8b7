"""Whole positions of channels-last samples, as the kernels that stream them take them.

A tile is [LANES, VEC], a lane for each thread and VEC neighbouring columns (channels), a vector, what it loads at
once.  `units` lanes side by side are all columns of a position, the next ones those of the next position.  A lane
keeps its columns for all positions.

Lanes that are too few for one more position idle: they share the place of the last one's.
"""

import triton
import triton.language as tl

from fusednorm.jit.moments import widened
from fusednorm.jit.pieces import chunk_of
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.gradients import gained_gradient


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
def load_masked_positions(
    ptr, start, at, position, positions, units, step, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles from ptr + start on, `step` elements apart; what does not exist, or where lanes idle, is 0.

    One load at a time, that is, and fewer registers: for what was asked into L2 before, more programs are faster.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = stored_mask(position, positions, units, left, i, WHOLE, IDLE)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
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


@triton.jit
def load_gradient_positions(
    dy_ptr, x_ptr, residual_ptr, start, at, position, positions, units, tile, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`load_masked_positions` of dy, x and residual, which lie alike."""
    return (
        load_masked_positions(
            dy_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT
        ),
        load_masked_positions(x_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT),
        load_masked_positions(
            residual_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT
        ),
    )


@triton.jit
def prefetch_gradient_positions(dy_ptr, x_ptr, residual_ptr, start, size):
    """`prefetch` of `size` elements from `start` on of each that is not None."""
    prefetch(dy_ptr + start, size)
    prefetch(x_ptr + start, size)
    if residual_ptr is not None:
        prefetch(residual_ptr + start, size)


@triton.jit
def add_gradient_positions(
    tiles, mean, scale, offset, sums, sums_centred, sample, sample_at, tile, positions, left, position,
    seed, dropout_threshold, dropout_scale,
    WHOLE: tl.constexpr, IDLE: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Sums of GAIN * dz, and of that times h - mean, of each column, [LANES, VEC], with those of the tiles."""
    for i in tl.static_range(len(tiles[0])):
        centred = chunk_of(tiles[1], tiles[2], i, FAST) - mean
        if not WHOLE:
            # z of what is not there may be infinite, and 0 * inf would spoil a sum.
            centred = tl.where(position_mask(position, positions, left, i, WHOLE), centred, 0.0)
        dz = gained_gradient(
            widened(tiles[0][i], FAST), centred, scale, offset, sample, sample_at + i * tile,
            seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN, FAST,
        )  # fmt: skip
        sums += dz
        sums_centred += dz * centred
    return sums, sums_centred


@triton.jit
def sums_of_columns(
    a, b, units, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, IDLE: tl.constexpr, FAST: tl.constexpr
):
    """Sums of two tiles [LANES, VEC] over all positions, [1, COLUMNS] each, and which of these columns exist.

    Where no lane is idle, lanes are POSITIONS times COLUMNS; else positions start at any multiple of `units` lanes.
    """
    lanes: tl.constexpr = a.shape[0] * a.shape[1]
    if IDLE:
        column = tl.arange(0, COLUMNS)
        columns = units * a.shape[1]
        flat_a = tl.reshape(a, (lanes,))
        flat_b = tl.reshape(b, (lanes,))
        sum_a = tl.zeros((COLUMNS,), tl.float32)
        sum_b = tl.zeros((COLUMNS,), tl.float32)
        for position in tl.static_range(POSITIONS):
            index = tl.minimum(position * columns + column, lanes - 1)
            sum_a += tl.gather(flat_a, index, 0)
            sum_b += tl.gather(flat_b, index, 0)
        return sum_a[None, :], sum_b[None, :], (column < columns)[None, :]
    else:
        sum_a, sum_b = sum_pair(tl.reshape(a, (POSITIONS, COLUMNS)), tl.reshape(b, (POSITIONS, COLUMNS)), 0, FAST)
        return sum_a, sum_b, tl.full((1, COLUMNS), True, tl.int1)
