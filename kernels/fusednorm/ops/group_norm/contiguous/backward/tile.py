"""Backward pass of contiguous groups small enough for the registers of one program.

With z = x_hat * slope + offset, dz = dy * act'(z) (dropout's factor included) and g = slope * dz, over a group of M
values: dx = rstd * (g - (sum(g) + x_hat * sum(g * x_hat)) / M).  Both sums come from the sums of dz and of
dz * x_hat over each channel of the sample, which the gradients of slope and offset need too; x_hat is centred, so
there is no cancellation in either.
"""

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import load_masked, load_residual_sum
from fusednorm.jit.moments import convert_sums_to_moments
from fusednorm.jit.reductions import multiply_for_uniform_sum, multiply_rounded, sum_pair
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue, load_scaled_slope_and_offset


@dataclass(frozen=True, slots=True)
class GroupNormBackwardTile(GroupNormBackwardConfig):
    """A configuration of one launch in which each program keeps `groups_per_program` small contiguous groups in
    registers.

    Each group is padded to `channels` x `positions` elements.
    """

    groups_per_program: int
    channels: int
    positions: int
    num_warps: int

    needs_statistics: ClassVar[bool] = False

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launch for dx and partial sums, and the launches for parameter gradients."""
        vec, sample = call.channel_vec, call.sample
        rows = call.n * sample.groups
        parts = call.allocate_partials_if_wanted(1)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *parts,
            rows, sample.hw // vec, sample.groups, sample.group_channels, call.affine.sample_stride,
            call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "ROWS": self.groups_per_program,
            "CHANNELS": self.channels,
            "POSITIONS": self.positions,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        grid = (cdiv(rows, self.groups_per_program),)
        return [
            Launch(group_norm_nchw_backward_tile_kernel, grid, arguments, options),
            *plan_parameter_reductions(parts, call.affine, call.out, 1, call.can_start_early),
        ]


@triton.jit(do_not_specialize=["rows", "channel_units", "groups", "channels", "scale_stride"])
def group_norm_nchw_backward_tile_kernel(
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
    rows: tl.int64,
    channel_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx of ROWS groups per program, and partial sums for the parameters. dy and x are read once.

    The groups are [ROWS, CHANNELS, POSITIONS] in registers.  If mean_ptr is None, the kernel computes the
    statistics.
    """
    allow_next_launch(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    channel = tl.arange(0, CHANNELS)[None, :, None]
    position = tl.arange(0, POSITIONS)[None, None, :]
    row_mask = row < rows
    channel_mask = row_mask & (channel < channels)
    mask = channel_mask & (position < channel_units * VEC)
    at = (row * channels + channel) * (channel_units.to(tl.int64) * VEC) + position
    length = (channels * channel_units).to(tl.float32) * VEC
    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    parameter = group * channels + channel

    dy = load_masked(dy_ptr, at, mask, "evict_first")
    h = load_residual_sum(x_ptr, residual_ptr, at, mask, "evict_first")
    if mean_ptr is None:
        pivot = tl.sum(tl.sum(h, 2, keep_dims=True), 1, keep_dims=True) / length
        d = tl.where(mask, h - pivot, 0.0)
        square = tl.sum(multiply_for_uniform_sum(d, d), 2, keep_dims=True)
        rest, square = sum_pair(tl.sum(d, 2, keep_dims=True), square, 1)
        rest, square = convert_sums_to_moments(length, rest, square)
        rstd = approximate_rsqrt(square / length + eps)
        centred = (h - pivot) - rest
    else:
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        centred = h - mean

    slope, offset = load_scaled_slope_and_offset(
        parameters, parameter, sample * scale_stride + parameter, channel_mask, GAIN
    )
    xhat = tl.where(mask, centred * rstd, 0.0)
    sample_start = sample * groups * channels * (channel_units.to(tl.int64) * VEC)
    dz = backpropagate_scaled_epilogue(
        dy, xhat, slope, offset, sample, at - sample_start, seed, dropout_threshold, dropout_scale, negative_slope,
        ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
    sum_dz, sum_dz_xhat = sum_pair(dz, multiply_for_uniform_sum(dz, xhat), 2)
    if dz_part_ptr is not None:
        slot = row * channels + channel
        tl.store(dz_part_ptr + slot, sum_dz * (1.0 / GAIN), mask=channel_mask)
        tl.store(dz_xhat_part_ptr + slot, sum_dz_xhat * (1.0 / GAIN), mask=channel_mask)
    sum_g, sum_g_xhat = sum_pair(multiply_rounded(sum_dz, slope), multiply_rounded(sum_dz_xhat, slope), 1)
    dx = rstd * (dz * slope - (sum_g + xhat * sum_g_xhat) / length)
    if dresidual_out_ptr is not None:
        dx += load_masked(dresidual_out_ptr, at, mask, "evict_first")
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
