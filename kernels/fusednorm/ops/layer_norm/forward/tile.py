"""Forward kernels of LayerNorm and RMSNorm.

Sizes and strides arrive in units of VEC elements, a constexpr: multiplied back inside, every address is a
known multiple of VEC and the compiler emits 128-bit accesses without specialising on the row length.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate, dropout_keep_tile
from fusednorm.jit.heads import parameter_start, programs_of_head, row_of_token, row_start
from fusednorm.jit.moments import (
    column_mask,
    load_rows,
    offset_weight,
    slab_moments,
    sweep_moments,
    widened,
)
from fusednorm.jit.prefetch import FEW_PROGRAMS, prefetch, prefetch_parameters, prefetch_row_ahead


@triton.jit
def finish(
    y,
    row,
    first_col,
    seed,
    dropout_threshold,
    dropout_scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """What follows the affine step: activation and dropout of a tile that starts at column `first_col`."""
    y = activate(y, ACTIVATION, FAST)
    if DROPOUT:
        keep = dropout_keep_tile(seed, row, first_col // 4, dropout_threshold, y.shape[0], y.shape[1])
        y = tl.where(keep, y * dropout_scale, 0.0)
    return y


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
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Persistent programs over tiles of ROWS rows, read once through shared memory, STAGES - 1 tiles ahead.

    A program holds CHUNKS blocks of BLOCK_N columns: row lengths like 5 * 1024 waste no lanes.
    """
    cols = col_units * VEC
    program, programs, head, heads = programs_of_head(HEADS)
    own = parameter_start(head, cols, HEADS)
    n = cols.to(tl.float32)
    columns = ()
    col_masks = ()
    weights = ()
    biases = ()
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        col_mask = column_mask(col, cols, EVEN)
        columns = columns + (col,)
        col_masks = col_masks + (col_mask,)
        if weight_ptr is not None:
            weights = weights + (tl.load(weight_ptr + own + col, mask=col_mask, other=0.0),)
        if bias_ptr is not None:
            biases = biases + (tl.load(bias_ptr + own + col, mask=col_mask, other=0.0),)
    tiles = tl.cdiv(rows, ROWS)

    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        token = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = token < rows
        row = row_of_token(token, head, heads, HEADS)
        x_row = row_start(token, row, head, x_row_units * VEC, cols, HEADS)
        residual_row = row_start(token, row, head, residual_row_units * VEC, cols, HEADS)
        chunks = ()
        for i in tl.static_range(CHUNKS):
            h = load_rows(
                x_ptr,
                residual_ptr,
                x_row + columns[i],
                residual_row + columns[i],
                row_mask & col_masks[i],
                "",
                FAST,
            )
            chunks = chunks + (h,)
        pivot, shift, square = slab_moments(chunks, col_masks, n, EVEN, IS_RMS, FAST)
        rstd = 1.0 / tl.sqrt(square / n + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, pivot + shift, mask=row_mask)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row_mask)

        for i in tl.static_range(CHUNKS):
            mask = row_mask & col_masks[i]
            y_at = row * cols.to(tl.int64) + columns[i]
            if residual_out_ptr is not None:
                residual_out = chunks[i].to(residual_out_ptr.dtype.element_ty)
                tl.store(residual_out_ptr + y_at, residual_out, mask=mask)
            if IS_RMS:
                y = chunks[i] * rstd
            else:
                y = (chunks[i] - pivot) * rstd - shift * rstd
            if weight_ptr is not None:
                y = y * offset_weight(widened(weights[i], FAST), WEIGHT_OFFSET)
            if bias_ptr is not None:
                y = y + widened(biases[i], FAST)
            y = finish(
                y,
                row,
                i * BLOCK_N,
                seed,
                dropout_threshold,
                dropout_scale,
                ACTIVATION,
                DROPOUT,
                FAST,
            )
            tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["ahead", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
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
    ahead,
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
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One row a program in two sweeps; the second walks backwards and finds the row in L1 or L2.

    The row of the program `ahead` programs on is asked into L2 meanwhile; 0 for none.
    """
    cols = col_units * VEC
    program, _, head, heads = programs_of_head(HEADS)
    token = program.to(tl.int64) + tl.zeros((1, 1), tl.int64)
    row = row_of_token(token, head, heads, HEADS)
    col = tl.arange(0, BLOCK_N)[None, :]
    x_row = row_start(token, row, head, x_row_units * VEC, cols, HEADS)
    residual_row = row_start(token, row, head, residual_row_units * VEC, cols, HEADS)
    own = parameter_start(head, cols, HEADS)
    y_row = row * cols.to(tl.int64)
    chunks = tl.cdiv(cols, BLOCK_N)

    if PREFETCH:
        if tl.num_programs(0) <= FEW_PROGRAMS:
            # Nothing else hides this program's latency: everything that it reads at once.
            prefetch(x_ptr + tl.program_id(0).to(tl.int64) * (x_row_units * VEC), cols)
            prefetch_parameters(weight_ptr, bias_ptr, 0, cols)
        else:
            prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    rough, shift, variance = sweep_moments(
        x_ptr, residual_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, GROUP, IS_RMS, FAST
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, rough + shift)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    if y_ptr is not None:
        for step in range(0, chunks):
            first_col = (chunks - 1 - step) * BLOCK_N
            at = col + first_col
            mask = column_mask(at, cols, EVEN)
            h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_first", FAST)
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + y_row + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            y = (h - rough) * rstd - shift * rstd
            if weight_ptr is not None:
                weight = widened(tl.load(weight_ptr + own + at, mask=mask, other=0.0), FAST)
                y = y * offset_weight(weight, WEIGHT_OFFSET)
            if bias_ptr is not None:
                y = y + widened(tl.load(bias_ptr + own + at, mask=mask, other=0.0), FAST)
            y = finish(y, row, first_col, seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, FAST).to(
                y_ptr.dtype.element_ty
            )
            tl.store(y_ptr + y_row + at, y, mask=mask, eviction_policy="evict_first")
