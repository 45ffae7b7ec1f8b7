"""Forward pass of contiguous groups that reads a group twice, one program for each group."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.contiguous.group_ranges import compute_range_moments, normalise_range


@dataclass(frozen=True, slots=True)
class GroupNormForwardSweep(GroupNormForwardConfig):
    """A configuration in which each program reads one contiguous group twice: for its moments, then for y.

    The program reads tiles of `tile_vectors` vectors.  If programs may not wait for one another, this is
    the only algorithm for groups up to 256 KiB that do not fit registers.  If they may, this is the
    algorithm for a 16-bit x with a float32 residual and dropout whose channels are not multiples of 16
    bytes.
    """

    tile_vectors: int
    num_warps: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one launch, with one program per group."""
        arguments = (
            *call.tensors, *call.statistics, call.group_vectors, *call.channel_indexing,
            call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = call.make_contiguous_options(self.tile_vectors, self.num_warps)
        return [Launch(group_norm_nchw_forward_sweep_kernel, (call.n * call.sample.groups,), arguments, options)]


@triton.jit(
    do_not_specialize=["group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride"]
)
def group_norm_nchw_forward_sweep_kernel(
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
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of one group per program in two sweeps: a sweep for the moments, then a sweep that writes y.

    The second sweep reads backwards, because the end of the group is still in L1 or L2.
    """
    row = tl.program_id(0).to(tl.int64)
    base = row * (group_units.to(tl.int64) * VEC)
    group_residual_ptr = residual_ptr + base if residual_ptr is not None else None
    mean, rest, square = compute_range_moments(x_ptr + base, group_residual_ptr, 0, group_units, VEC, UNITS)
    rstd = approximate_rsqrt(square / (group_units.to(tl.float32) * VEC) + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row + tl.zeros((1, 1, 1), tl.int32), mean + rest)
        tl.store(rstd_ptr + row + tl.zeros((1, 1, 1), tl.int32), rstd)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    normalise_range(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rest, rstd, row, 0, group_units,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale, negative_slope,
        VEC, UNITS, ALIGNED, False, ACTIVATION, DROPOUT,
    )  # fmt: skip
