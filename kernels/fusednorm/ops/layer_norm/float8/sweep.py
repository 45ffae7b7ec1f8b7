"""Float8 pass that reads a row three times, one program for each row."""

import triton
import triton.language as tl

from fusednorm.jit.loads import column_mask, load_rows
from fusednorm.jit.moments import store_row_statistics, sweep_moments
from fusednorm.jit.prefetch import prefetch_row_ahead
from fusednorm.jit.reductions import maximum
from fusednorm.launch.launch import ByRows, Launch, can_prefetch
from fusednorm.ops.layer_norm.call import ForwardCall
from fusednorm.ops.layer_norm.float8.scale import magnitude, scale_of, unscaled
from fusednorm.ops.layer_norm.forward.sweep import ForwardSweep


def float8_sweep_launches(call: ForwardCall, config: ForwardSweep) -> list[Launch]:
    """The launch of a pass over rows of any length."""
    # At most the elements of one 16-byte load of x: for wider stores of y the compiler gives a thread more
    # elements.
    layout = call.layout_of_rows(16 // call.itemsize)
    options = {
        **config.options(call.cols, call.itemsize),
        "PREFETCH": can_prefetch(layout.vec, call.x, call.residual),
        "IS_RMS": call.options.is_rms,
        **call.constexprs(layout.vec),
    }
    ahead = config.ahead_per_sm * call.multiprocessors
    arguments = (*call.tensors, call.scale, ahead, *layout.sizes, call.options.eps, *call.options.dropout_arguments)
    return [Launch(layer_norm_float8_sweep_kernel, (call.rows,), arguments, options, ByRows())]


@triton.jit(
    do_not_specialize=["ahead", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
)
def layer_norm_float8_sweep_kernel(
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
):
    """One row per program in three sweeps: moments, largest |y| (backwards), y; the last two read from L1 or L2.

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
        x_ptr, residual_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, GROUP, IS_RMS
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, rough, shift, rstd, None)

    largest = tl.zeros((BLOCK_N // GROUP, 1), tl.float32)
    for step in range(0, chunks):
        first_col = lane_col + (chunks - 1 - step) * BLOCK_N
        at = first_col + tl.arange(0, GROUP)[None, :]
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_last")
        y = unscaled(
            h, rough, shift, rstd, weight_ptr, bias_ptr, at, mask, row, first_col,
            seed, dropout_threshold, dropout_scale, IS_RMS, WEIGHT_OFFSET, ACTIVATION, DROPOUT,
        )  # fmt: skip
        of_lane = maximum(magnitude(y, mask, EVEN), 1)
        largest = tl.maximum(largest, of_lane, propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of(maximum(largest, 0))
    tl.store(scale_ptr + row, scale)

    inverse = 1.0 / scale
    for chunk in range(0, chunks):
        first_col = lane_col + chunk * BLOCK_N
        at = first_col + tl.arange(0, GROUP)[None, :]
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_first")
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + y_row + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = unscaled(
            h, rough, shift, rstd, weight_ptr, bias_ptr, at, mask, row, first_col,
            seed, dropout_threshold, dropout_scale, IS_RMS, WEIGHT_OFFSET, ACTIVATION, DROPOUT,
        )  # fmt: skip
        y = (y * inverse).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_row + at, y, mask=mask, eviction_policy="evict_first")
