"""Backward kernels of GroupNorm where channels come last in memory; formulas as in the contiguous kernels.

Tiles are those of the channels-last forward: a thread keeps its channels for the whole walk over positions,
and sums of dz and dz * x_hat are kept per channel, folded to groups once at the end.
"""

import triton
import triton.language as tl

from fusednorm._group_norm_nhwc_kernels import block_of_columns, load_statistic
from fusednorm._group_norm_tiles import load_bias, load_masked, load_sum, load_weight, output_gradient
from fusednorm._reductions import sum_pair


@triton.jit
def _channel_sums(
    dy_ptr,
    x_ptr,
    residual_ptr,
    mean,
    rstd,
    weight,
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
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sums of dz and of dz * x_hat of each column over first_row <= row < last_row, [1, CV, VEC] each."""
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    sum_dz = tl.zeros(at.shape, tl.float32)
    sum_dz_xhat = tl.zeros(at.shape, tl.float32)
    for start in range(first_row, last_row, ROWS):
        mask = (start + row < last_row) & column_mask
        offset = start * row_stride + at
        dy = load_masked(dy_ptr, offset, mask, "evict_last")
        h = load_sum(x_ptr, residual_ptr, offset, mask, "evict_last")
        # Masked elements count as x_hat = 0: -mean * rstd may overflow, and 0 * inf would spoil the sum.
        xhat = tl.where(mask, (h - mean) * rstd, 0.0)
        dz = output_gradient(
            dy, xhat, weight, bias, sample, offset, seed, dropout_threshold, dropout_scale,
            ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
        sum_dz += dz
        sum_dz_xhat += dz * xhat
    return sum_pair(sum_dz, sum_dz_xhat, 0, FAST)


@triton.jit
def _rows_input_gradient(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    dx_ptr,
    mean,
    rstd,
    weight,
    bias,
    mean_g,
    mean_g_xhat,
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
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write dx of first_row <= row < last_row of a block of columns, the last rows first."""
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    scale = rstd * weight
    offset_dx = rstd * mean_g
    slope_dx = rstd * mean_g_xhat
    steps = tl.cdiv(last_row - first_row, ROWS)
    for step in range(0, steps):
        start = first_row + (steps - 1 - step) * ROWS
        mask = (start + row < last_row) & column_mask
        offset = start * row_stride + at
        dy = load_masked(dy_ptr, offset, mask, "evict_first")
        xhat = (load_sum(x_ptr, residual_ptr, offset, mask, "evict_first") - mean) * rstd
        dz = output_gradient(
            dy, xhat, weight, bias, sample, offset, seed, dropout_threshold, dropout_scale,
            ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
        dx = scale * dz - (offset_dx + xhat * slope_dx)
        if dresidual_out_ptr is not None:
            dx += load_masked(dresidual_out_ptr, offset, mask, "evict_first")
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "splits", "split_rows", "blocks"])
def group_norm_nhwc_backward_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    split_rows: tl.int64,
    blocks: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sums of a block of columns over one split of the positions; parts lie as [N, splits, C]."""
    program = tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    group = sample * groups + column // channels
    base = sample * hw * c
    first_row = (run - sample * splits) * split_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    sum_dz, sum_dz_xhat = _channel_sums(
        dy_ptr + base, x_ptr, residual_ptr,
        load_statistic(mean_ptr, group, column_mask), load_statistic(rstd_ptr, group, column_mask),
        load_weight(weight_ptr, column, column_mask), load_bias(bias_ptr, column, column_mask),
        sample, first_row, tl.minimum(first_row + split_rows, hw), c.to(tl.int64), column, column_mask,
        seed, dropout_threshold, dropout_scale, ROWS, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
    tl.store(dz_part_ptr + run * c + column, sum_dz, mask=column_mask)
    tl.store(dz_xhat_part_ptr + run * c + column, sum_dz_xhat, mask=column_mask)


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "splits", "split_rows", "blocks"])
def group_norm_nhwc_backward_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    dx_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    split_rows: tl.int64,
    blocks: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """dx of a block of columns over one split of the positions; programs walk the tensor backwards."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    group = sample * groups + column // channels
    base = sample * hw * c
    first_row = (run - sample * splits) * split_rows
    length = (hw * channels).to(tl.float32)
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    if dresidual_out_ptr is not None:
        dresidual_out_ptr += base
    _rows_input_gradient(
        dy_ptr + base, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr + base,
        load_statistic(mean_ptr, group, column_mask), load_statistic(rstd_ptr, group, column_mask),
        load_weight(weight_ptr, column, column_mask), load_bias(bias_ptr, column, column_mask),
        load_statistic(sum_g_ptr, group, column_mask) / length,
        load_statistic(sum_g_xhat_ptr, group, column_mask) / length,
        sample, first_row, tl.minimum(first_row + split_rows, hw), c.to(tl.int64), column, column_mask,
        seed, dropout_threshold, dropout_scale, ROWS, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
