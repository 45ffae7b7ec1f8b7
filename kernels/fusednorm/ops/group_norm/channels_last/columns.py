"""Blocks of channels-last columns read in tiles: their moments and their outputs.

A program owns a block of columns (channels) and processes positions in tiles [ROWS, CV, VEC]: VEC channels are one
128-bit access of one thread, and a thread has the same channels at all positions, so it loads parameters and
statistics once.  A tile may hold groups of any width: moments are per channel and reduced to groups at the end.

Each row of a tile has its own pivot of a channel; as in the contiguous kernels, with n values per row of the tile
the error from cancellation is at most n * 2^-24 of the result.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import load_residual_sum
from fusednorm.jit.moments import merge_moments


@triton.jit
def compute_channel_moments(
    x_ptr,
    residual_ptr,
    first_row,
    last_row,
    row_stride,
    column,
    column_mask,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute mean, `rest` and sum of squared deviations of each column, [1, CV, VEC] each.

    The mean is mean + rest.  A column's values are those at the positions first_row <= row < last_row.

    Args:
        x_ptr, residual_ptr: the sample's first element.
        column: [1, CV, VEC] int32.
        column_mask: [1, CV, 1], which vectors of columns exist.
    """
    STEP: tl.constexpr = ROWS * UNROLL
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    rows = last_row - first_row
    mask = (row < rows) & column_mask
    offset = first_row * row_stride + at
    pivot = load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_last")
    sum_1 = tl.zeros(at.shape, tl.float32)
    sum_2 = tl.zeros(at.shape, tl.float32)
    full = rows // STEP
    for step in range(0, full):
        for k in tl.static_range(UNROLL):
            start = first_row + step * STEP + k * ROWS
            offset = start * row_stride + at
            d = load_residual_sum(x_ptr, residual_ptr, offset, column_mask, "evict_last") - pivot
            sum_1 += d
            sum_2 += d * d
    for tail in range(first_row + full * STEP, last_row, ROWS):
        mask = (tail + row < last_row) & column_mask
        offset = tail * row_stride + at
        h = load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_last")
        d = tl.where(mask, h - pivot, 0.0)
        sum_1 += d
        sum_2 += d * d

    count = ((rows + (ROWS - 1) - row) // ROWS).to(tl.float32)
    total = rows.to(tl.float32)
    shift = sum_1 / tl.maximum(count, 1.0)
    return merge_moments(count, pivot, shift, sum_2 - sum_1 * shift, total, 0)


@triton.jit
def normalise_positions(
    x_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    mean,
    scale,
    bias,
    sample,
    first_row,
    last_row,
    row_stride,
    column,
    column_mask,
    seed,
    dropout_threshold,
    dropout_scale,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of the positions first_row <= row < last_row of a block of columns, last positions first.

    A step of UNROLL tiles starts with all its loads, so that they are in flight together, and then holds one tile
    at a time in float32.  `mean`, `scale` and `bias` are [1, CV, VEC]; pointers are the sample's.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    STEP: tl.constexpr = ROWS * UNROLL
    steps = tl.cdiv(last_row - first_row, STEP)
    for step in range(0, steps):
        start = first_row + (steps - 1 - step) * STEP
        tiles = ()
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            tiles = tiles + (load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_first"),)
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            h = tiles[k]
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + offset, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            y = activate_for_dtype((h - mean) * scale + bias, y_ptr.dtype.element_ty, ACTIVATION)
            if DROPOUT:
                keep = compute_keep_mask(seed, sample, offset, dropout_threshold)
                y = tl.where(keep, y * dropout_scale, 0.0)
            tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def load_column_statistic(ptr, group, column_mask):
    """Load the float32 statistic of each column's group; `group` is the offset of that group's statistic."""
    return tl.load(ptr + group, mask=column_mask, other=0.0)


@triton.jit
def locate_columns(first_unit, end_unit, CV: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr):
    """Compute the columns of CV vectors, [1, CV, VEC], and the mask of vectors that exist, [1, CV, 1].

    The vectors are those from `first_unit` on; those before `end_unit` exist.  If all do (EVEN), the mask is a
    constant that the compiler removes.
    """
    unit = first_unit + tl.arange(0, CV)[None, :, None]
    column = unit * VEC + tl.arange(0, VEC)[None, None, :]
    if EVEN:
        mask = tl.full(unit.shape, True, tl.int1)
    else:
        mask = unit < end_unit
    return column, mask
