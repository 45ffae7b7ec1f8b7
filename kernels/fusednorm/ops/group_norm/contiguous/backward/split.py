"""Backward pass of contiguous groups whose programs wait for nothing: sums first, then dx.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradient_tiles`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.backward_split import (
    plan_split_backward_launches,
    store_fragment_gradients,
    sum_fragment_gradients,
)
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.contiguous.channel_runs import compute_run_positions, store_channel_sums
from fusednorm.ops.group_norm.gradient_tiles import load_scaled_slope_and_offset

_SIZES = [
    "parts", "blocks", "fragments", "channel_units", "groups", "channels", "scale_stride", "seed",
    "dropout_threshold",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupNormBackwardSplit(GroupNormBackwardConfig):
    """A configuration in which no program waits for another.  One kernel sums over parts of groups, then
    another kernel computes dx.

    Each program has one part of a contiguous group; the fields are those of `GroupNormBackwardCooperative`.

    It is the only algorithm for groups larger than a tile if programs may not wait for one another, if a
    channel's size is not a multiple of 16 bytes, or if the device's programs or L2 cannot hold a group.
    """

    channels: int
    chunks: int
    fragments: int
    num_warps: int

    def count_range_positions(self, itemsize: int) -> int:
        """Return the number of positions of a part."""
        return self.fragments * self.chunks * (32 * self.num_warps // self.channels) * (16 // itemsize)

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launches for sums of channels, their reduction to groups, dx, and parameter gradients."""
        sample, itemsize = call.sample, call.x.element_size()
        vec = call.channel_vec
        parts = cdiv(sample.hw, self.count_range_positions(itemsize))
        blocks = cdiv(sample.group_channels, self.channels)
        shape = (
            parts, blocks, self.fragments, sample.hw // vec, sample.groups, sample.group_channels,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "CHANNELS": self.channels,
            "LANES": 32 * self.num_warps,
            "GROUP": 16 // itemsize,
            "CHUNKS": self.chunks,
            "EVEN": sample.hw % self.count_range_positions(itemsize) == 0
            and sample.group_channels % self.channels == 0,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        kernels = group_norm_nchw_backward_split_sums_kernel, group_norm_nchw_backward_split_apply_kernel
        return plan_split_backward_launches(
            call, kernels, (call.n * sample.groups * blocks * parts,), shape, options, parts
        )


@triton.jit
def _locate_program(
    program, parts, blocks, fragments, hw, groups, channels,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Compute the sample, the channels and the positions that a program processes.

    Returns the index of the group among those of all samples, the sample, the part, the first channel in the
    group, the lanes' channels from there on, [LANES, 1] or 0, and the first position.
    """
    part = program % parts
    block = (program // parts) % blocks
    row = program // (parts * blocks)
    first_channel = block * CHANNELS
    if CHANNELS == 1:
        lane_channel = 0
    else:
        lane_channel = tl.arange(0, LANES)[:, None] // (LANES // CHANNELS)
    return row, row // groups, part, first_channel, lane_channel, part.to(tl.int64) * fragments * RUN


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nchw_backward_split_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    parts: tl.int32,
    blocks: tl.int32,
    fragments: tl.int32,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum dz and dz * x_hat of each channel.  A program sums over one range of positions of CHANNELS channels.

    The sums are written to [N, parts, C].  Here, dz is the gradient of the affine step's output.
    """
    allow_next_launch(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    hw = channel_units * VEC
    c = groups.to(tl.int64) * channels
    row, sample, part, first_channel, lane_channel, first = _locate_program(
        tl.program_id(0), parts, blocks, fragments, hw, groups, channels, CHANNELS, LANES, RUN
    )
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    group_channel = (row - sample * groups) * channels
    position = compute_run_positions(LANES, UNITS, GROUP)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    slope, offset = load_scaled_slope_and_offset(
        parameters, group_channel + channel, sample * scale_stride + group_channel + channel, channel_mask, GAIN
    )
    sum_dz, sum_dz_centred = sum_fragment_gradients(
        dy_ptr, x_ptr, residual_ptr, sample, group_channel + first_channel, first, fragments, hw, c,
        (lane_channel, position, channel_mask), mean, slope, rstd, offset,
        (seed, dropout_threshold, dropout_scale, negative_slope), LANES, 1, STEP, CHUNKS, EVEN,
        False, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
    slot = (sample * parts + part) * c + group_channel + first_channel
    store_channel_sums(
        dz_part_ptr, dz_xhat_part_ptr, slot, sum_dz, sum_dz_centred, rstd, channels - first_channel,
        CHANNELS, UNITS, GAIN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nchw_backward_split_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    dx_ptr,
    parts: tl.int32,
    blocks: tl.int32,
    fragments: tl.int32,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx.  Each program handles one range of positions of CHANNELS channels.

    The ranges that the kernel for sums read last are processed first: they are still in the cache.
    """
    allow_next_launch(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    hw = channel_units * VEC
    c = groups.to(tl.int64) * channels
    row, sample, _, first_channel, lane_channel, first = _locate_program(
        tl.num_programs(0) - 1 - tl.program_id(0),
        parts,
        blocks,
        fragments,
        hw,
        groups,
        channels,
        CHANNELS,
        LANES,
        RUN,
    )
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    group_channel = (row - sample * groups) * channels
    position = compute_run_positions(LANES, UNITS, GROUP)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    slope, offset = load_scaled_slope_and_offset(
        parameters, group_channel + channel, sample * scale_stride + group_channel + channel, channel_mask, GAIN
    )
    inverse_size = 1.0 / (channels * hw).to(tl.float32)
    scale = slope * rstd
    await_previous_launch(EARLY)
    constant = tl.load(sum_g_ptr + row) * inverse_size * rstd
    factor = tl.load(sum_g_xhat_ptr + row) * inverse_size * rstd * rstd
    store_fragment_gradients(
        dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr, sample, group_channel + first_channel, first,
        fragments, hw, c, (lane_channel, position, channel_mask), mean, scale, offset, constant, factor,
        (seed, dropout_threshold, dropout_scale, negative_slope), STEP, CHUNKS, EVEN,
        False, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
