"""Forward kernels of LayerNorm and RMSNorm.

Sizes and strides arrive in units of VEC elements, a constexpr: multiplied back inside, every address is a
known multiple of VEC and the compiler emits 128-bit accesses without specialising on the row length.
"""

import triton
import triton.language as tl

from fusednorm._row_moments import column_mask, load_rows, sweep_moments, tile_moments
from fusednorm.epilogue import activate, dropout_keep_tile


@triton.jit
def _store_output(
    y_ptr,
    y_at,
    x_hat,
    weight_ptr,
    bias_ptr,
    row,
    first_col,
    col,
    col_mask,
    mask,
    seed,
    dropout_threshold,
    dropout_scale,
    EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Affine step, activation, dropout and the store of one tile."""
    # The parameters are loaded here, after the reductions, so that they hold no registers during them.
    y = x_hat
    if weight_ptr is not None:
        y = y * tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION, FAST)
    if DROPOUT:
        keep = dropout_keep_tile(seed, row, first_col // 4, dropout_threshold, x_hat.shape[0], x_hat.shape[1])
        y = tl.where(keep, y * dropout_scale, 0.0)
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit(
    do_not_specialize=["rows", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
)
def layer_norm_forward_tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
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
    BLOCK_N: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """ROWS whole rows a program, held in registers: read once, two-pass statistics, written once."""
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    row_mask = row < rows
    col_mask = column_mask(col, cols, EVEN)
    mask = row_mask & col_mask
    x_at = row * (x_row_units * VEC) + col
    residual_at = row * (residual_row_units * VEC) + col
    y_at = row * cols.to(tl.int64) + col

    h = load_rows(x_ptr, residual_ptr, x_at, residual_at, mask, "evict_first")
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + y_at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
    centred, mean, variance = tile_moments(h, col_mask, cols, EVEN, IS_RMS, FAST)
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row_mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row_mask)

    _store_output(
        y_ptr,
        y_at,
        centred * rstd,
        weight_ptr,
        bias_ptr,
        row,
        0,
        col,
        col_mask,
        mask,
        seed,
        dropout_threshold,
        dropout_scale,
        "evict_first",
        ACTIVATION,
        DROPOUT,
        FAST,
    )


@triton.jit(
    do_not_specialize=["rows", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
)
def layer_norm_forward_sweep_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
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
    BLOCK_N: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One row a program in two sweeps; the second walks backwards and finds the row in L1 or L2."""
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    col = tl.arange(0, BLOCK_N)[None, :]
    x_row = row * (x_row_units * VEC)
    residual_row = row * (residual_row_units * VEC)
    y_row = row * cols.to(tl.int64)
    chunks = tl.cdiv(cols, BLOCK_N)

    rough, shift, variance = sweep_moments(
        x_ptr, residual_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, IS_RMS, FAST
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, rough + shift)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    for step in range(0, chunks):
        first_col = (chunks - 1 - step) * BLOCK_N
        at = col + first_col
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_first")
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + y_row + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        _store_output(
            y_ptr,
            y_row + at,
            ((h - rough) - shift) * rstd,
            weight_ptr,
            bias_ptr,
            row,
            first_col,
            at,
            mask,
            mask,
            seed,
            dropout_threshold,
            dropout_scale,
            "evict_first",
            ACTIVATION,
            DROPOUT,
            FAST,
        )
