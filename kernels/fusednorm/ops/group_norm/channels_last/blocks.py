"""Blocks of channels-last columns, as the backward kernels walk them.

A tile is [LANES, GROUP], a lane for each thread and GROUP neighbouring columns, a vector, what it loads at once.
CV lanes side by side are a block's columns, the next ones those of the next position.  A lane keeps its columns for
the whole walk.
"""

import triton
import triton.language as tl

from fusednorm.jit.moments import widened
from fusednorm.jit.pieces import chunk_of
from fusednorm.ops.group_norm.gradients import gained_gradient

_ASK = """{
.reg .pred asker;
setp.ne.s32 asker, $2, 0;
@asker prefetch.global.L2 [$1];
mov.u32 $0, 0;
}"""
ASK: tl.constexpr = tl.constexpr(_ASK)


def most_touched(size: int, window: int) -> int:
    """Intervals of `size`, one behind another, that a window at a multiple of its own size touches at most."""
    if window % size == 0:
        return window // size
    return 1 if size % window == 0 else (window - 2) // size + 2


@triton.jit
def vector_mask(vector, block_units, first_column, c, EVEN: tl.constexpr):
    """Which vectors of a block exist."""
    if EVEN:
        return tl.full(vector.shape, True, tl.int1)
    else:
        return (vector < block_units) & (first_column < c)


@triton.jit
def tile_mask(row, left, columns, wanted, EVEN: tl.constexpr):
    """Which vectors of a tile exist: all wanted ones where EVEN, else those of columns and rows below `left`."""
    mask = tl.full(row.shape, True, tl.int1) & wanted
    if not EVEN:
        mask = mask & (row < left) & columns
    return mask


@triton.jit
def load_tiles(
    ptr, start, at, step, row, left, columns, wanted,
    EVEN: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A piece, a tuple of CHUNKS tiles of ROWS positions as they lie in memory; empty where ptr is None.

    The first tile's elements lie `start` + `at` from ptr on, the next one's `step` further.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = tile_mask(row + i * ROWS, left, columns, wanted, EVEN)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_gradient_tiles(
    dy_ptr, x_ptr, residual_ptr, start, at, step, row, left, columns, wanted,
    EVEN: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`load_tiles` of dy, x and residual, which lie alike."""
    dys = load_tiles(dy_ptr, start, at, step, row, left, columns, wanted, EVEN, ROWS, CHUNKS, EVICT)
    xs = load_tiles(x_ptr, start, at, step, row, left, columns, wanted, EVEN, ROWS, CHUNKS, EVICT)
    residuals = load_tiles(residual_ptr, start, at, step, row, left, columns, wanted, EVEN, ROWS, CHUNKS, EVICT)
    return dys, xs, residuals


@triton.jit
def tile_gradient(
    piece, i: tl.constexpr, row, left, columns,
    mean, slope, offset, sample, sample_position, seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h - mean and GAIN * dz of tile i of a piece, z being (h - mean) * slope + offset times GAIN.

    `row` and `sample_position` are the tile's own positions and places in the sample.
    """
    centred = chunk_of(piece[1], piece[2], i, FAST) - mean
    if not EVEN:
        # z of what is not there may be infinite, and 0 * inf would spoil a sum.
        centred = tl.where(tile_mask(row, left, columns, True, False), centred, 0.0)
    dz = gained_gradient(
        widened(piece[0][i], FAST), centred, slope, offset, sample, sample_position,
        seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN, FAST,
    )  # fmt: skip
    return centred, dz


@triton.jit
def of_columns(values, place):
    """A value for each column from those of the groups that its vector touches, `place` being which of them."""
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(place == i, values[i], value)
    return value


@triton.jit
def load_statistic(ptr, first_group, vector_group, last_group, place, LABELS: tl.constexpr):
    """A float32 statistic for each column, whose vector touches LABELS groups from `vector_group` on at most."""
    values = ()
    for i in tl.static_range(LABELS):
        values = values + (tl.load(ptr + first_group + tl.minimum(vector_group + i, last_group)),)
    return of_columns(values, place)


@triton.jit
def prefetch_tile(ptrs, wanted):
    """Bring what a tile points to into L2, without waiting for it."""
    tl.inline_asm_elementwise(
        ASK, "=r,l,r", [ptrs.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
