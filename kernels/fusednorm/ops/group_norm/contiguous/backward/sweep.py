"""Backward pass of contiguous groups in which one program reads a group twice: for its sums, then for dx.

The second read is from L1 or L2.  No program waits for another.  The formulas are in `contiguous.backward.tile`;
z's slope and offset, and GAIN, in `gradient_tiles`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import multiply_rounded, sum_pair_to_scalars
from fusednorm.launch.launches import Launch, can_prefetch
from fusednorm.ops.group_norm.backward_split import store_fragment_gradients, sum_fragment_gradients
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.contiguous.channel_runs import compute_run_positions, store_channel_sums
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import load_scaled_slope_and_offset


@dataclass(frozen=True, slots=True)
class GroupNormBackwardSweep(GroupNormBackwardConfig):
    """A configuration in which one program reads a contiguous group twice.

    A program has `channels` channels at a time, and processes them in fragments of `chunks` tiles, which have one
    access per thread.
    """

    channels: int
    chunks: int
    num_warps: int

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launch for dx and the sums of channels, and the launches for parameter gradients."""
        sample, itemsize, vec = call.sample, call.x.element_size(), call.channel_vec
        fragment_positions = self.chunks * (32 * self.num_warps // self.channels) * (16 // itemsize)
        parts = call.allocate_partials_if_wanted(1)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *parts,
            cdiv(sample.hw, fragment_positions), sample.hw // vec, sample.groups, sample.group_channels,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "CHANNELS": self.channels,
            "LANES": 32 * self.num_warps,
            "GROUP": 16 // itemsize,
            "CHUNKS": self.chunks,
            "EVEN": sample.hw % fragment_positions == 0 and sample.group_channels % self.channels == 0,
            "PREFETCH": can_prefetch(vec, *call.inputs),
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        return [
            Launch(group_norm_nchw_backward_sweep_kernel, (call.n * sample.groups,), arguments, options),
            *plan_parameter_reductions(parts, call.affine, call.out, 1, call.can_start_early),
        ]


@triton.jit(
    do_not_specialize=[
        "fragments", "channel_units", "groups", "channels", "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_backward_sweep_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
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
    PREFETCH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx of one group per program, and the sums of dz and of dz * x_hat of each channel.

    The group is read CHANNELS channels at a time, for the sums from the first on and for dx from the last on.  The
    sums are written to [N, C].  Here, dz is the gradient of the affine step's output.
    """
    allow_next_launch(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    hw = channel_units * VEC
    c = groups.to(tl.int64) * channels
    row = tl.program_id(0)
    if PREFETCH:
        count = (channels * hw).to(tl.int32)
        prefetch(x_ptr + row.to(tl.int64) * count, count)
        prefetch(dy_ptr + row.to(tl.int64) * count, count)
        if residual_ptr is not None:
            prefetch(residual_ptr + row.to(tl.int64) * count, count)
    sample = row // groups
    group_channel = (row - sample * groups) * channels
    lane_channel = tl.arange(0, LANES)[:, None] // UNITS
    position = compute_run_positions(LANES, UNITS, GROUP)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    blocks = tl.cdiv(channels, CHANNELS)
    lane_g = tl.zeros((LANES, 1), tl.float32)
    lane_g_xhat = tl.zeros((LANES, 1), tl.float32)
    for block in range(0, blocks):
        first_channel = block * CHANNELS
        channel_mask = first_channel + lane_channel < channels
        channel = group_channel + first_channel + lane_channel
        slope, offset = load_scaled_slope_and_offset(
            parameters, channel, sample * scale_stride + channel, channel_mask, GAIN
        )
        sum_dz, sum_dz_centred = sum_fragment_gradients(
            dy_ptr, x_ptr, residual_ptr, sample, group_channel + first_channel, 0, fragments, hw, c,
            (lane_channel, position, channel_mask), mean, slope, rstd, offset,
            (seed, dropout_threshold, dropout_scale, negative_slope), LANES, 1, STEP, CHUNKS, EVEN,
            False, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        lane_g += multiply_rounded(sum_dz, slope)
        lane_g_xhat += multiply_rounded(sum_dz_centred, slope * rstd)
        if dz_part_ptr is not None:
            store_channel_sums(
                dz_part_ptr, dz_xhat_part_ptr, sample * c + group_channel + first_channel, sum_dz, sum_dz_centred,
                rstd, channels - first_channel, CHANNELS, UNITS, GAIN,
            )  # fmt: skip
    sum_g, sum_g_xhat = sum_pair_to_scalars(tl.reshape(lane_g, (LANES,)), tl.reshape(lane_g_xhat, (LANES,)))
    inverse_size = 1.0 / (channels * hw).to(tl.float32)
    constant = sum_g * inverse_size * rstd
    factor = sum_g_xhat * inverse_size * rstd * rstd
    for reverse_block in range(0, blocks):
        first_channel = (blocks - 1 - reverse_block) * CHANNELS
        channel_mask = first_channel + lane_channel < channels
        channel = group_channel + first_channel + lane_channel
        slope, offset = load_scaled_slope_and_offset(
            parameters, channel, sample * scale_stride + channel, channel_mask, GAIN
        )
        store_fragment_gradients(
            dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr, sample, group_channel + first_channel, 0,
            fragments, hw, c, (lane_channel, position, channel_mask), mean, slope * rstd, offset, constant, factor,
            (seed, dropout_threshold, dropout_scale, negative_slope), STEP, CHUNKS, EVEN,
            False, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
