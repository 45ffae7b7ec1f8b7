"""Forward kernels of GroupNorm where channels come last in memory, [N, positions, C], and x is read twice.

Blocks of columns in a kernel for moments of channels and one for y, for what `channels_last.forward.stream` do
not take: a residual in the other layout, and more columns than a program has lanes.
"""

import triton
import triton.language as tl

from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.ops.group_norm.affine import load_masked_affine
from fusednorm.ops.group_norm.channels_last.sweeps import (
    block_of_columns,
    channel_moments,
    load_statistic,
    normalise_rows,
)


@triton.jit(do_not_specialize=["hw", "column_units", "splits", "split_rows", "blocks"])
def group_norm_nhwc_stats_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    splits: tl.int32,
    split_rows: tl.int64,
    blocks: tl.int32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of a block of columns over one split of the positions; parts lie as [N, splits, C]."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    split = run - sample * splits
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    base = sample * hw * c
    first_row = split * split_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    mean, square = channel_moments(
        x_ptr, residual_ptr, first_row, tl.minimum(first_row + split_rows, hw), hw, c.to(tl.int64),
        column, column_mask, ROWS, UNROLL, RESIDUAL_OTHER, FAST,
    )  # fmt: skip
    tl.store(mean_part_ptr + run * c + column, mean, mask=column_mask)
    tl.store(square_part_ptr + run * c + column, square, mask=column_mask)


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "runs", "run_rows", "blocks"])
def group_norm_nhwc_apply_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    runs: tl.int32,
    run_rows: tl.int64,
    blocks: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one run of positions of a block of columns; programs walk the tensor backwards."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // runs
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    group = sample * groups + column // channels
    base = sample * hw * c
    first_row = (run - sample * runs) * run_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
        residual_out_ptr += base

    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    weight, bias = load_masked_affine(parameters, column, sample * scale_stride + column, column_mask)
    await_previous(EARLY)
    scale = load_statistic(rstd_ptr, group, column_mask) * weight
    normalise_rows(
        x_ptr, residual_ptr, y_ptr + base, residual_out_ptr,
        load_statistic(mean_ptr, group, column_mask), scale, bias,
        sample, first_row, tl.minimum(first_row + run_rows, hw), hw, c.to(tl.int64), column, column_mask,
        seed, dropout_threshold, dropout_scale, ROWS, 1, RESIDUAL_OTHER, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
