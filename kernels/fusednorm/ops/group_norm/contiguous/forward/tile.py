"""Forward kernels of GroupNorm where each group is contiguous: [N, C, *spatial] in plain memory order.

Small groups several to a program, one that a program reads twice, and parts of one in a kernel for moments and one
for y; what they walk in is in `contiguous.sweeps`.
"""

import triton
import triton.language as tl

from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.contiguous.sweeps import normalise_run, run_moments, store_normalised
from fusednorm.ops.group_norm.contiguous.tiles import load_sum
from fusednorm.ops.group_norm.reduce import fold_moments


@triton.jit(
    do_not_specialize=[
        "rows",
        "group_units",
        "groups",
        "channels",
        "channel_length",
        "magic",
        "shift",
        "scale_stride",
    ]
)
def group_norm_nchw_tile_kernel(
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
    rows: tl.int64,
    group_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int32,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """ROWS whole groups a program, held in registers: read once, two-pass statistics, written once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    unit = tl.arange(0, UNITS)[None, :, None]
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    row_mask = row < rows
    mask = row_mask & (unit < group_units)
    base = row * (group_units.to(tl.int64) * VEC)
    length = group_units.to(tl.float32) * VEC

    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    h = load_sum(x_ptr, residual_ptr, at, at, mask, "evict_first")
    pivot = tl.sum(tl.sum(h, 2, keep_dims=True), 1, keep_dims=True) / length
    d = tl.where(mask, h - pivot, 0.0)
    offset, square = sum_pair(tl.sum(d, 2, keep_dims=True), tl.sum(d * d, 2, keep_dims=True), 1, FAST)
    offset /= length
    variance = square / length - offset * offset
    rstd = 1.0 / tl.sqrt(tl.where(variance < 0.0, 0.0, variance) + eps)
    mean = pivot + offset
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row_mask)
        tl.store(rstd_ptr + row, rstd, mask=row_mask)

    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    store_normalised(
        h, mean, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, mask,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, ALIGNED, False, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride"]
)
def group_norm_nchw_sweep_kernel(
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
    group_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int32,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One group a program in two sweeps; the second walks backwards and finds the group in L1 or L2."""
    row = tl.program_id(0).to(tl.int64)
    base = row * (group_units.to(tl.int64) * VEC)
    group_residual_ptr = residual_ptr + base if residual_ptr is not None else None
    mean, square = run_moments(x_ptr + base, group_residual_ptr, None, 0, group_units, VEC, UNITS, False, FAST)
    rstd = 1.0 / tl.sqrt(square / (group_units.to(tl.float32) * VEC) + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row + tl.zeros((1, 1, 1), tl.int32), mean)
        tl.store(rstd_ptr + row + tl.zeros((1, 1, 1), tl.int32), rstd)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    normalise_run(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rstd, row, 0, group_units,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, UNITS, ALIGNED, False, False, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["group_units", "groups", "channels", "splits", "split_units"])
def group_norm_nchw_stats_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    split_units: tl.int64,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    WIDE: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of one part of one group; parts lie as [N, splits, G]."""
    let_next_start(EARLY)
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = program - row * splits
    base = row * (group_units * VEC)
    first = split * split_units
    last = tl.minimum(first + split_units, group_units)
    if not WIDE:
        first = first.to(tl.int32)
        last = last.to(tl.int32)
    sample = row // groups
    elsewhere = ((row - sample * groups) * channels, group_units * VEC // channels, groups.to(tl.int64) * channels)
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += sample * groups * (group_units * VEC) if RESIDUAL_OTHER else base
    mean, square = run_moments(x_ptr, residual_ptr, elsewhere, first, last, VEC, UNITS, RESIDUAL_OTHER, FAST)
    slot = (sample * splits + split) * groups + (row - sample * groups) + tl.zeros((1, 1, 1), tl.int32)
    tl.store(mean_part_ptr + slot, mean)
    tl.store(square_part_ptr + slot, square)


@triton.jit(
    do_not_specialize=[
        "group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride", "splits",
        "split_units",
        "programs_a_group", "program_units",
    ]
)  # fmt: skip
def group_norm_nchw_apply_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_part_ptr,
    square_part_ptr,
    mean_ptr,
    rstd_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int64,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    splits: tl.int32,
    split_units: tl.int64,
    programs_a_group: tl.int32,
    program_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Fold the parts of one group, then write one run of it; programs walk the tensor backwards."""
    await_previous(EARLY)
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = program // programs_a_group
    part = program - row * programs_a_group
    sample = row // groups
    mean, variance = fold_moments(
        mean_part_ptr + sample * splits * groups,
        square_part_ptr + sample * splits * groups,
        row - sample * groups,
        1,
        groups,
        splits,
        split_units * VEC,
        group_units * VEC,
        BLOCK_SPLITS,
        1,
        FAST,
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
        if part == 0:
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
    first = part * program_units
    last = tl.minimum(first + program_units, group_units)
    if not WIDE:
        first = first.to(tl.int32)
        last = last.to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    normalise_run(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rstd, row, first, last,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, UNITS, ALIGNED, WIDE, RESIDUAL_OTHER, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
