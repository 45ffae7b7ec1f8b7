"""Forward pass that streams channels-last samples twice: moments, their reduction, then y.

No program waits for another.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.moments import merge_moments
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.affine_step import load_slope_and_offset
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.channels_last.samples import (
    compute_split_moments,
    load_sample_fragment,
    store_normalised_sample_fragment,
)
from fusednorm.ops.group_norm.channels_last.stream_partitions import make_stream_partition
from fusednorm.ops.group_norm.channels_last.stream_positions import count_split_steps, locate_lanes
from fusednorm.ops.group_norm.sample_shape import allocate_triple

_REDUCE_CHANNELS = 512
"""The most channels for which a reduction writes coefficients at a time."""

_REDUCE_WARPS = 4
"""Warps of a program that reduces a group's moments; for few moments one warp is faster: it needs no barrier."""


@dataclass(frozen=True, slots=True)
class ForwardSampleStream(GroupNormForwardConfig):
    """Moments of up to `splits` parts of each sample, then y of fragments.

    For moments a thread has `chunks` accesses per step; a fragment is `apply_chunks` accesses of a thread.
    """

    num_warps: int
    chunks: int
    apply_chunks: int
    splits: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        sample, x, out = call.sample, call.x, call.out
        partition = make_stream_partition(sample, x.element_size(), self, call.n, x.device)
        parts = allocate_triple(x, call.n, partition.splits, sample.groups)
        coefficients = new_workspace(x, 3, call.n, sample.c)
        fragment = partition.positions * partition.apply_chunks
        moments = (
            x, call.residual, *parts, sample.hw, partition.position_vectors, sample.groups, sample.group_channels,
            partition.splits
        )  # fmt: skip
        reduce = (
            *parts, *call.tensors[2:6], out.mean, out.rstd, coefficients, sample.hw, sample.groups,
            sample.group_channels, partition.splits, partition.step_positions, call.affine.sample_stride,
            call.n * sample.c, call.options.eps,
        )  # fmt: skip
        apply = (
            x, call.residual, out.y, out.residual_out, coefficients, sample.hw, partition.position_vectors, call.n,
            *call.options.dropout_arguments,
        )  # fmt: skip
        return [
            Launch(
                group_norm_nhwc_forward_stream_moments_kernel,
                (call.n * partition.splits,),
                moments,
                {
                    **partition.make_tile_options(self.num_warps),
                    **partition.make_moment_options(sample),
                    "CHUNKS": self.chunks,
                    "WHOLE": sample.hw % partition.step_positions == 0,
                    "EARLY": call.can_start_early,
                },
            ),
            Launch(
                group_norm_nhwc_forward_stream_reduce_kernel,
                (call.n * sample.groups,),
                reduce,
                {
                    "SPLITS": next_power_of_2(partition.splits),
                    "BLOCK_CHANNELS": min(_REDUCE_CHANNELS, next_power_of_2(sample.group_channels)),
                    "num_warps": 1 if partition.has_extra_splits else _REDUCE_WARPS,
                    **make_early_options(call.can_start_early),
                },
            ),
            Launch(
                group_norm_nhwc_forward_stream_apply_kernel,
                (call.n * cdiv(sample.hw, fragment),),
                apply,
                {
                    **partition.make_tile_options(self.num_warps),
                    "IDLE": partition.has_idle_lanes,
                    "CHUNKS": partition.apply_chunks,
                    "WHOLE": sample.hw % fragment == 0,
                    **make_early_options(call.can_start_early),
                    **call.options.constexprs,
                },
            ),
        ]


@triton.jit(do_not_specialize=["hw", "units", "groups", "channels", "splits"])
def group_norm_nhwc_forward_stream_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    hw: tl.int32,
    units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write the moments of each group over one split of a sample per program to [N, splits, groups]."""
    allow_next_launch(EARLY)
    program = tl.program_id(0).to(tl.int64)
    mean, rest, square = compute_split_moments(
        x_ptr, residual_ptr, program // splits, (program % splits).to(tl.int32), splits, hw, units, channels,
        VEC, LANES, CHUNKS, WHOLE, SUMS, GROUPS, RUNS,
    )  # fmt: skip
    group = tl.arange(0, GROUPS)
    tl.store(mean_part_ptr + program * groups + group, mean, mask=group < groups)
    tl.store(rest_part_ptr + program * groups + group, rest, mask=group < groups)
    tl.store(square_part_ptr + program * groups + group, square, mask=group < groups)


@triton.jit(do_not_specialize=["hw", "groups", "channels", "splits", "step", "scale_stride", "columns"])
def group_norm_nhwc_forward_stream_reduce_kernel(
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    mean_ptr,
    rstd_ptr,
    coefficient_ptr,
    hw: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    step: tl.int32,
    scale_stride: tl.int64,
    columns: tl.int64,
    eps: tl.float32,
    SPLITS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the splits' moments of one group per program, and write its statistics and its channels' coefficients.

    The three coefficients have `columns` columns each; y is act((h - first) * second + third).
    """
    allow_next_launch(EARLY)
    program = tl.program_id(0)
    sample = (program // groups).to(tl.int64)
    group = program % groups
    split = tl.arange(0, SPLITS)
    present = split < splits
    turns, left = count_split_steps(split, hw, splits, step)
    counts = tl.where(present, (turns - 1) * step + left, 0).to(tl.float32) * channels
    total = hw.to(tl.float32) * channels
    at = (sample * splits + split) * groups + group
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    slope, offset = _load_group_slope_and_offset(
        parameters, sample, group, channels, 0, scale_stride, BLOCK_CHANNELS
    )
    await_previous_launch(EARLY)
    means = tl.load(mean_part_ptr + at, mask=present, other=0.0)
    rests = tl.load(rest_part_ptr + at, mask=present, other=0.0)
    squares = tl.load(square_part_ptr + at, mask=present, other=0.0)
    mean, rest, square = merge_moments(counts, means, rests, squares, total, 0)
    rstd = 1.0 / tl.sqrt(square / total + eps)
    if mean_ptr is not None:
        here = program + tl.arange(0, 1)
        tl.store(mean_ptr + here, mean + rest)
        tl.store(rstd_ptr + here, rstd)
    coefficients = coefficient_ptr + sample * (groups * channels) + group * channels
    for start in range(0, channels, BLOCK_CHANNELS):
        if start > 0:
            slope, offset = _load_group_slope_and_offset(
                parameters, sample, group, channels, start, scale_stride, BLOCK_CHANNELS
            )
        within = start + tl.arange(0, BLOCK_CHANNELS)
        of_group = within < channels
        tl.store(coefficients + within, mean + tl.zeros((BLOCK_CHANNELS,), tl.float32), mask=of_group)
        tl.store(coefficients + columns + within, rstd * slope, mask=of_group)
        tl.store(coefficients + 2 * columns + within, offset - rest * (rstd * slope), mask=of_group)


@triton.jit
def _load_group_slope_and_offset(
    parameters, sample, group, channels, start, scale_stride, BLOCK_CHANNELS: tl.constexpr
):
    """Load the slope and offset of a group's channels from `start` on, [BLOCK_CHANNELS] each."""
    within = start + tl.arange(0, BLOCK_CHANNELS)
    channel = group * channels + within
    slope, offset = load_slope_and_offset(parameters, channel, sample * scale_stride + channel, within < channels)
    return slope + tl.zeros((BLOCK_CHANNELS,), tl.float32), offset + tl.zeros((BLOCK_CHANNELS,), tl.float32)


@triton.jit(do_not_specialize=["hw", "units", "samples", "seed", "dropout_threshold"])
def group_norm_nhwc_forward_stream_apply_kernel(
    x_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    coefficient_ptr,
    hw: tl.int32,
    units: tl.int32,
    samples: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write y of one fragment of CHUNKS tiles per program.

    The last positions of all samples are processed first, as they were read last.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program % samples).to(tl.int64)
    positions = LANES // units
    c = units * VEC
    first = (program // samples).to(tl.int64) * (positions * CHUNKS)
    left = tl.minimum(hw - first, positions * CHUNKS).to(tl.int32)
    tiles = load_sample_fragment(x_ptr, sample, first, hw, units, left, VEC, LANES, CHUNKS, WHOLE)
    residuals = load_sample_fragment(residual_ptr, sample, first, hw, units, left, VEC, LANES, CHUNKS, WHOLE)
    await_previous_launch(EARLY)
    _, column, _ = locate_lanes(units, LANES, VEC)
    coefficients = coefficient_ptr + sample * c + column
    columns = samples.to(tl.int64) * c
    mean = tl.load(coefficients)
    slope = tl.load(coefficients + columns)
    offset = tl.load(coefficients + 2 * columns)
    store_normalised_sample_fragment(
        tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset,
        sample, first, hw, units, left, (seed, dropout_threshold, dropout_scale),
        VEC, LANES, WHOLE, IDLE, ACTIVATION, DROPOUT,
    )  # fmt: skip
