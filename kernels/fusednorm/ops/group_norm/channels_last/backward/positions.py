"""Positions of dy, x and residual in the backward kernels that stream samples, and sums of columns.

Tiles are those of `channels_last.positions`.
"""

import triton
import triton.language as tl

from fusednorm.jit.loads import add_residual_chunk, widen
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.channels_last.stream_positions import make_position_mask, make_store_mask
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue


@triton.jit
def load_masked_positions(
    ptr, start, at, position, positions, units, step, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS tiles [LANES, VEC] from ptr + start on, `step` elements apart; () if ptr is None.

    Elements of idle lanes, and of positions that do not exist, are 0.  Masked loads run one at a time and need
    fewer registers: for data prefetched into L2, more programs are faster.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = make_store_mask(position, positions, units, left, i, WHOLE, IDLE)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_gradient_positions(
    dy_ptr, x_ptr, residual_ptr, start, at, position, positions, units, tile, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load tiles of dy, x and residual by `load_masked_positions`; all have one layout."""
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
    """Prefetch `size` elements from `start` on of dy, x and, unless its pointer is None, the residual into L2."""
    prefetch(dy_ptr + start, size)
    prefetch(x_ptr + start, size)
    if residual_ptr is not None:
        prefetch(residual_ptr + start, size)


@triton.jit
def accumulate_gradient_positions(
    tiles, mean, scale, offset, sums, sums_centred, sample, sample_at, tile, positions, left, position,
    seed, dropout_threshold, dropout_scale,
    WHOLE: tl.constexpr, IDLE: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Add tiles to the sums of GAIN * dz and of GAIN * dz * (h - mean) of each column, [LANES, VEC] each.

    `tiles` is the result of `load_gradient_positions`; `sample_at` are the offsets of the first tile's elements in
    the sample, and `tile` is the number of elements of a tile.
    """
    for i in tl.static_range(len(tiles[0])):
        centred = add_residual_chunk(tiles[1], tiles[2], i) - mean
        if not WHOLE:
            # z of an element that does not exist may be infinite, and 0 * inf = NaN would spoil a sum.
            centred = tl.where(make_position_mask(position, positions, left, i, WHOLE), centred, 0.0)
        dz = backpropagate_scaled_epilogue(
            widen(tiles[0][i]), centred, scale, offset, sample, sample_at + i * tile,
            seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        sums += dz
        sums_centred += dz * centred
    return sums, sums_centred


@triton.jit
def sum_columns(a, b, units, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, IDLE: tl.constexpr):
    """Sum each of two tiles [LANES, VEC] over its positions, [1, COLUMNS] each.

    Also returns the mask of columns that exist, [1, COLUMNS].

    If no lane is idle, lanes are [POSITIONS, COLUMNS]; else positions start at any multiple of `units` lanes.
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
        sum_a, sum_b = sum_pair(tl.reshape(a, (POSITIONS, COLUMNS)), tl.reshape(b, (POSITIONS, COLUMNS)), 0)
        return sum_a, sum_b, tl.full((1, COLUMNS), True, tl.int1)
