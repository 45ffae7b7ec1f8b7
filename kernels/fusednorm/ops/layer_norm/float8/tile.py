"""Float8 pass over tiles of rows that stay in registers for all of its steps."""

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.moments import store_row_statistics, tile_moments
from fusednorm.jit.prefetch import prefetch_row_ahead
from fusednorm.jit.reductions import maximum
from fusednorm.jit.tiles import load_tile
from fusednorm.launch.launch import ByRows, Launch, can_prefetch
from fusednorm.ops.layer_norm.call import ForwardCall
from fusednorm.ops.layer_norm.float8.scale import magnitude, scale_of, unscaled
from fusednorm.ops.layer_norm.forward.tile import TILE_AHEAD_PER_SM, ForwardTile


def float8_tile_launches(call: ForwardCall, config: ForwardTile) -> list[Launch]:
    """The launch of a pass over rows that fit a tile."""
    # At most the elements of one 16-byte load of x: for wider stores of y the compiler gives a thread more
    # elements.
    layout = call.layout_of_rows(16 // call.itemsize)
    options = {
        **config.options(call.cols),
        "PREFETCH": config.rows == 1 and can_prefetch(layout.vec, call.x, call.residual),
        "IS_RMS": call.options.is_rms,
        **call.constexprs(layout.vec),
    }
    ahead = TILE_AHEAD_PER_SM * call.multiprocessors
    scalars = (ahead, call.rows, *layout.sizes, call.options.eps, *call.options.dropout_arguments)
    arguments = (*call.tensors, call.scale, *scalars)
    programs = cdiv(call.rows, config.rows)
    by_rows = ByRows(config.rows, rows=len(call.tensors) + 2)
    return [Launch(layer_norm_float8_tile_kernel, (programs,), arguments, options, by_rows)]


@triton.jit(
    do_not_specialize=[
        "ahead",
        "rows",
        "col_units",
        "x_row_units",
        "residual_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_float8_tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    scale_ptr,
    ahead,
    rows: tl.int64,
    col_units,
    x_row_units: tl.int64,
    residual_row_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """One tile of ROWS rows per program; it stays in registers as CHUNKS blocks of BLOCK_N columns.

    With PREFETCH (ROWS is 1) a program prefetches the row of the program `ahead` programs later into L2.
    """
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    row_mask = row < rows
    x_row = row * (x_row_units * VEC)
    residual_row = row * (residual_row_units * VEC)
    columns, col_masks, chunks = load_tile(
        x_ptr, residual_ptr, x_row, residual_row, row_mask, cols, EVEN, BLOCK_N, CHUNKS
    )
    if PREFETCH:
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    n = cols.to(tl.float32)
    pivot, shift, square = tile_moments(chunks, col_masks, n, EVEN, IS_RMS)
    rstd = 1.0 / tl.sqrt(square / n + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, pivot, shift, rstd, row_mask)

    values = ()
    largest = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for i in tl.static_range(CHUNKS):
        if residual_out_ptr is not None:
            residual_out = chunks[i].to(residual_out_ptr.dtype.element_ty)
            at = row * cols.to(tl.int64) + columns[i]
            mask = row_mask & col_masks[i]
            tl.store(residual_out_ptr + at, residual_out, mask=mask)
        y = unscaled(
            chunks[i], pivot, shift, rstd, weight_ptr, bias_ptr, columns[i], col_masks[i], row, i * BLOCK_N,
            seed, dropout_threshold, dropout_scale, IS_RMS, WEIGHT_OFFSET, ACTIVATION, DROPOUT,
        )  # fmt: skip
        magnitudes = magnitude(y, col_masks[i], EVEN)
        largest = tl.maximum(largest, magnitudes, propagate_nan=tl.PropagateNan.ALL)
        values = values + (y,)
    scale = scale_of(maximum(largest, 1))
    tl.store(scale_ptr + row, scale, mask=row_mask)

    inverse = 1.0 / scale
    for i in tl.static_range(CHUNKS):
        y = (values[i] * inverse).to(y_ptr.dtype.element_ty)
        at = row * cols.to(tl.int64) + columns[i]
        tl.store(y_ptr + at, y, mask=row_mask & col_masks[i])
