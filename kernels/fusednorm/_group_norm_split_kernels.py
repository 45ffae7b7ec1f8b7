"""Forward kernels of GroupNorm in two sweeps of pieces, for what fits neither one program nor the chip.

A kernel for the moments of every piece, then, after `group_norm_fold_moments_kernel`, one that reads x again.  No
program waits for another.  A program loads its whole piece at once; the second kernel walks backwards, so that the
end of x is still in L2.
"""

import triton
import triton.language as tl

from fusednorm._early_start import await_previous, let_next_start
from fusednorm._group_norm_nchw_pieces import lane_moments, load_chunk_affine, load_chunks, write_chunks
from fusednorm._group_norm_nhwc_pieces import (
    columns_of,
    fold_to_groups,
    load_columns,
    load_rows,
    run_moments,
    write_rows,
)
from fusednorm._row_pieces import total_moments


@triton.jit(do_not_specialize=["group_units", "groups", "splits"])
def group_norm_nchw_split_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of one piece of a contiguous group; parts lie as [N, splits, G]."""
    let_next_start(EARLY)
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = program - row * splits
    length = group_units * VEC
    first = split * (CHUNKS * BLOCK)
    left = tl.minimum(length - first, CHUNKS * BLOCK).to(tl.int32)
    at = row * length + first
    chunks = load_chunks(x_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_last")
    residuals = load_chunks(residual_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_last")
    count, means, rests, squares = lane_moments(chunks, residuals, left, FULL, BLOCK, GROUP, FAST)
    mean, rest, square = total_moments(count, means, rests, squares, FULL == CHUNKS, FAST)
    sample = row // groups
    slot = (sample * splits + split) * groups + (row - sample * groups)
    tl.store(mean_part_ptr + slot, mean + rest)
    tl.store(square_part_ptr + slot, square)


@triton.jit(
    do_not_specialize=[
        "group_units", "groups", "channels", "channel_length", "magic", "division_shift", "scale_stride", "splits",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_split_apply_kernel(
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
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int64,
    magic: tl.int64,
    division_shift: tl.int32,
    scale_stride: tl.int64,
    splits: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMETERS: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one piece of a contiguous group."""
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = program // splits
    length = group_units * VEC
    first = (program - row * splits) * (CHUNKS * BLOCK)
    left = tl.minimum(length - first, CHUNKS * BLOCK).to(tl.int32)
    if not WIDE:
        first = first.to(tl.int32)
    at = row * length + first
    walk = (groups, channels, channel_length, magic, division_shift, scale_stride)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    chunks = load_chunks(x_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_first")
    residuals = load_chunks(residual_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_first")
    await_previous(EARLY)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    affine = load_chunk_affine(parameters, row, first, walk, 0, BLOCK, GROUP, PARAMETERS, WIDE)
    write_chunks(
        chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, row, first, left, length, walk,
        mean, 0.0, rstd, (seed, dropout_threshold, dropout_scale), 0, 1,
        FULL, BLOCK, GROUP, PARAMETERS, WIDE, False, "evict_first", ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "blocks", "block_groups", "splits"])
def group_norm_nhwc_split_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    blocks: tl.int32,
    block_groups: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    EVEN: tl.constexpr,
    KEEP: tl.constexpr,
    GROUPS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of a block's groups over one piece of a sample's positions; parts lie as [N, splits, G]."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    first_row = (run - sample * splits) * (CHUNKS * ROWS)
    rows = tl.minimum(hw - first_row, CHUNKS * ROWS).to(tl.int32)
    stride = (column_units * VEC).to(tl.int64)
    column, column_mask = columns_of(block, block_groups * channels // VEC, column_units, CV, VEC, EVEN)
    at = tl.arange(0, ROWS)[:, None, None].to(tl.int64) * stride + column
    base = (sample * hw + first_row) * stride
    chunks = load_rows(x_ptr, base, at, stride, rows, column_mask, FULL, ROWS, CHUNKS, "evict_last")
    residuals = load_rows(residual_ptr, base, at, stride, rows, column_mask, FULL, ROWS, CHUNKS, "evict_last")
    mean, square = run_moments(chunks, residuals, rows, FULL, ROWS, KEEP, FAST)
    width: tl.constexpr = VEC // KEEP
    group = tl.arange(0, GROUPS)
    belongs = (tl.arange(0, CV * KEEP) * width // channels)[:, None] == group[None, :]
    mean, square = fold_to_groups(
        mean, square, belongs, channels.to(tl.float32) / width, rows.to(tl.float32) * width, FAST
    )
    first_group = block * block_groups
    mask = group < tl.minimum(block_groups, groups - first_group)
    tl.store(mean_part_ptr + run * groups + first_group + group, mean, mask=mask)
    tl.store(square_part_ptr + run * groups + first_group + group, square, mask=mask)


@triton.jit(
    do_not_specialize=[
        "hw", "column_units", "groups", "channels", "blocks", "block_groups", "splits",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_split_apply_kernel(
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
    blocks: tl.int32,
    block_groups: tl.int32,
    splits: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one piece of a sample's positions in a block of columns."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    first_row = (run - sample * splits) * (CHUNKS * ROWS)
    rows = tl.minimum(hw - first_row, CHUNKS * ROWS).to(tl.int32)
    c = column_units * VEC
    stride = c.to(tl.int64)
    column, column_mask = columns_of(block, block_groups * channels // VEC, column_units, CV, VEC, EVEN)
    at = tl.arange(0, ROWS)[:, None, None].to(tl.int64) * stride + column
    base = (sample * hw + first_row) * stride
    chunks = load_rows(x_ptr, base, at, stride, rows, column_mask, FULL, ROWS, CHUNKS, "evict_first")
    residuals = load_rows(residual_ptr, base, at, stride, rows, column_mask, FULL, ROWS, CHUNKS, "evict_first")
    affine = (
        load_columns(weight_ptr, column, column_mask),
        load_columns(bias_ptr, column, column_mask),
        load_columns(scale_ptr, sample * scale_stride + column, column_mask),
        load_columns(shift_ptr, sample * scale_stride + column, column_mask),
    )
    group = sample * groups + column // channels
    await_previous(EARLY)
    mean = tl.load(mean_ptr + group, mask=column_mask, other=0.0)
    rstd = tl.load(rstd_ptr + group, mask=column_mask, other=0.0)
    write_rows(
        chunks, residuals, affine, y_ptr, residual_out_ptr, base, at, stride, rows, column_mask, mean, rstd,
        sample, first_row * stride, (seed, dropout_threshold, dropout_scale), 0, 1,
        FULL, ROWS, False, "evict_first", ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
