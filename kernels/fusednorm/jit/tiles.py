"""Tiles of complete rows as float32, in blocks of columns: loads, and normalisation with given moments."""

import triton
import triton.language as tl

from fusednorm.jit.loads import (
    add_one,
    add_weight_offset,
    load_row_residual_sum,
    make_column_mask,
    widen,
)


@triton.jit
def load_tile(
    x_ptr, residual_ptr, gates, x_row, residual_row, row_mask, cols,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Load a tile of complete rows of residual + gate * x as CHUNKS blocks [ROWS, BLOCK_N] of float32.

    The first FULL blocks have no columns past the row's end.  `gates` are the blocks of the gate, or () for 1.
    Without a residual, the tile is x.  Returns three tuples: the blocks' columns [1, BLOCK_N], masks of
    columns [1, BLOCK_N], and values.

    `x_row`, `residual_row` and `row_mask` are [ROWS, 1]: the offset of each row in elements, and which rows
    exist.
    """
    columns = ()
    col_masks = ()
    chunks = ()
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        col_mask = make_column_mask(col, cols, i < FULL)
        _, h = load_row_residual_sum(
            x_ptr, residual_ptr, gates[i : i + 1], x_row + col, residual_row + col, row_mask & col_mask, ""
        )
        columns = columns + (col,)
        col_masks = col_masks + (col_mask,)
        chunks = chunks + (h,)
    return columns, col_masks, chunks


@triton.jit
def normalise(
    h, rough, shift, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, at, mask,
    IS_RMS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Normalise a tile h with given mean and rstd, and apply the affine step, and scale and shift.

    The mean is rough + shift; `at` and `mask` are the offsets and the mask of the parameters, which
    broadcast to h.
    """
    if IS_RMS:
        y = h * rstd
    else:
        y = (h - rough) * rstd - shift * rstd
    if weight_ptr is not None:
        y = y * add_weight_offset(widen(tl.load(weight_ptr + at, mask=mask, other=0.0)), WEIGHT_OFFSET)
    if bias_ptr is not None:
        y = y + widen(tl.load(bias_ptr + at, mask=mask, other=0.0))
    if scale_ptr is not None:
        y = y * add_one(widen(tl.load(scale_ptr + at, mask=mask, other=0.0)))
    if shift_ptr is not None:
        y = y + widen(tl.load(shift_ptr + at, mask=mask, other=0.0))
    return y
