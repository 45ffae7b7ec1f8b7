"""Forward kernels of LayerNorm and RMSNorm whose y is float8_e4m3fn with one scale a row.

The scale is the row's largest |y| over 448, the type's largest value, so it is known only when the whole row has
been through activation and dropout: a third pass over a row that is held, or a third sweep of one that is not.
Elements are multiplied by the reciprocal of the scale, one division a row, and rounded once, to nearest even.

Sizes and strides arrive in units of VEC elements, as in `forward.tile`.
"""

import triton
import triton.language as tl

from fusednorm.jit.moments import column_mask, load_rows, offset_weight, slab_moments, sweep_moments, widened
from fusednorm.jit.prefetch import prefetch_row_ahead
from fusednorm.jit.reductions import maximum
from fusednorm.ops.layer_norm.forward.tile import finish

_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
"""The smallest normal float32: its reciprocal is finite, so that a row of zeros stays one."""


@triton.jit
def _normalised(
    h,
    rough,
    shift,
    rstd,
    weight_ptr,
    bias_ptr,
    col,
    mask,
    row,
    first_col,
    seed,
    dropout_threshold,
    dropout_scale,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """y of a tile in float32, before its row's scale is known; `first_col` starts each row of the tile."""
    if IS_RMS:
        y = h * rstd
    else:
        y = (h - rough) * rstd - shift * rstd
    if weight_ptr is not None:
        weight = widened(tl.load(weight_ptr + col, mask=mask, other=0.0), FAST)
        y = y * offset_weight(weight, WEIGHT_OFFSET)
    if bias_ptr is not None:
        y = y + widened(tl.load(bias_ptr + col, mask=mask, other=0.0), FAST)
    return finish(y, row, first_col, seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, FAST)


@triton.jit
def _magnitude(y, mask, EVEN: tl.constexpr):
    """|y|, 0 in columns that do not exist: a bias or an activation may have put something there."""
    if EVEN:
        return tl.abs(y)
    else:
        return tl.where(mask, tl.abs(y), 0.0)


@triton.jit
def _scale_of(largest):
    """The scale of rows whose largest magnitude is `largest`; NaN stays NaN."""
    return tl.maximum(largest * (1.0 / _LARGEST), _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)


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
def layer_norm_quantise_held_kernel(
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
    FAST: tl.constexpr,
):
    """A tile of ROWS rows a program, held in registers as CHUNKS blocks of BLOCK_N columns from moments to y.

    With PREFETCH, ROWS 1, the row of the program `ahead` programs on is asked into L2.
    """
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    row_mask = row < rows
    columns = ()
    col_masks = ()
    chunks = ()
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        col_mask = column_mask(col, cols, EVEN)
        h = load_rows(
            x_ptr,
            residual_ptr,
            row * (x_row_units * VEC) + col,
            row * (residual_row_units * VEC) + col,
            row_mask & col_mask,
            "",
            FAST,
        )
        columns = columns + (col,)
        col_masks = col_masks + (col_mask,)
        chunks = chunks + (h,)
    if PREFETCH:
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    n = cols.to(tl.float32)
    pivot, shift, square = slab_moments(chunks, col_masks, n, EVEN, IS_RMS, FAST)
    rstd = 1.0 / tl.sqrt(square / n + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, pivot + shift, mask=row_mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row_mask)

    values = ()
    largest = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for i in tl.static_range(CHUNKS):
        if residual_out_ptr is not None:
            residual_out = chunks[i].to(residual_out_ptr.dtype.element_ty)
            at = row * cols.to(tl.int64) + columns[i]
            mask = row_mask & col_masks[i]
            tl.store(residual_out_ptr + at, residual_out, mask=mask)
        y = _normalised(
            chunks[i],
            pivot,
            shift,
            rstd,
            weight_ptr,
            bias_ptr,
            columns[i],
            col_masks[i],
            row,
            i * BLOCK_N,
            seed,
            dropout_threshold,
            dropout_scale,
            IS_RMS,
            WEIGHT_OFFSET,
            ACTIVATION,
            DROPOUT,
            FAST,
        )
        magnitude = _magnitude(y, col_masks[i], EVEN)
        largest = tl.maximum(largest, magnitude, propagate_nan=tl.PropagateNan.ALL)
        values = values + (y,)
    scale = _scale_of(maximum(largest, 1, FAST))
    tl.store(scale_ptr + row, scale, mask=row_mask)

    inverse = 1.0 / scale
    for i in tl.static_range(CHUNKS):
        y = (values[i] * inverse).to(y_ptr.dtype.element_ty)
        at = row * cols.to(tl.int64) + columns[i]
        tl.store(y_ptr + at, y, mask=row_mask & col_masks[i])


@triton.jit(
    do_not_specialize=["ahead", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
)
def layer_norm_quantise_sweep_kernel(
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
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One row a program in three sweeps: moments, largest magnitude (backwards), y; later ones find it in L1 or L2.

    A lane is the GROUP columns that one thread loads at once, as in `sweep_moments`.
    """
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    lane_col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP
    x_row = row * (x_row_units * VEC)
    residual_row = row * (residual_row_units * VEC)
    y_row = row * cols.to(tl.int64)
    chunks = tl.cdiv(cols, BLOCK_N)

    if PREFETCH:
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    rough, shift, variance = sweep_moments(
        x_ptr, residual_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, GROUP, IS_RMS, FAST
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, rough + shift)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    largest = tl.zeros((BLOCK_N // GROUP, 1), tl.float32)
    for step in range(0, chunks):
        first_col = lane_col + (chunks - 1 - step) * BLOCK_N
        at = first_col + tl.arange(0, GROUP)[None, :]
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_last", FAST)
        y = _normalised(
            h,
            rough,
            shift,
            rstd,
            weight_ptr,
            bias_ptr,
            at,
            mask,
            row,
            first_col,
            seed,
            dropout_threshold,
            dropout_scale,
            IS_RMS,
            WEIGHT_OFFSET,
            ACTIVATION,
            DROPOUT,
            FAST,
        )
        of_lane = maximum(_magnitude(y, mask, EVEN), 1, FAST)
        largest = tl.maximum(largest, of_lane, propagate_nan=tl.PropagateNan.ALL)
    scale = _scale_of(maximum(largest, 0, FAST))
    tl.store(scale_ptr + row, scale)

    inverse = 1.0 / scale
    for chunk in range(0, chunks):
        first_col = lane_col + chunk * BLOCK_N
        at = first_col + tl.arange(0, GROUP)[None, :]
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_first", FAST)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + y_row + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = _normalised(
            h,
            rough,
            shift,
            rstd,
            weight_ptr,
            bias_ptr,
            at,
            mask,
            row,
            first_col,
            seed,
            dropout_threshold,
            dropout_scale,
            IS_RMS,
            WEIGHT_OFFSET,
            ACTIVATION,
            DROPOUT,
            FAST,
        )
        y = (y * inverse).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_row + at, y, mask=mask, eviction_policy="evict_first")
