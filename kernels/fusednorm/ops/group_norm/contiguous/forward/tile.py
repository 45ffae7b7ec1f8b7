"""Forward pass of contiguous groups small enough for a program to hold several of them in registers."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.loads import load_residual_sum
from fusednorm.jit.moments import convert_sums_to_moments
from fusednorm.jit.reductions import multiply_for_uniform_sum, sum_pair
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.contiguous.group_ranges import store_normalised_tile


@dataclass(frozen=True, slots=True)
class GroupNormForwardTile(GroupNormForwardConfig):
    """A configuration in which each program holds `groups_per_program` small contiguous groups in registers.

    Each group is padded to `tile_vectors` vectors.
    """

    groups_per_program: int
    tile_vectors: int
    num_warps: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one launch, with one program per `groups_per_program` groups."""
        rows = call.n * call.sample.groups
        arguments = (
            *call.tensors, *call.statistics, rows, call.group_vectors, *call.channel_indexing,
            call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "ROWS": self.groups_per_program,
            **call.make_contiguous_options(self.tile_vectors, self.num_warps),
        }
        return [
            Launch(group_norm_nchw_forward_tile_kernel, (cdiv(rows, self.groups_per_program),), arguments, options)
        ]


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
def group_norm_nchw_forward_tile_kernel(
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
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y.  Each program reads ROWS groups once, holds them in registers and computes their statistics in
    two passes.
    """
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
    h = load_residual_sum(x_ptr, residual_ptr, at, mask, "evict_first")
    pivot = tl.sum(tl.sum(h, 2, keep_dims=True), 1, keep_dims=True) / length
    d = tl.where(mask, h - pivot, 0.0)
    square = tl.sum(multiply_for_uniform_sum(d, d), 2, keep_dims=True)
    rest, square = sum_pair(tl.sum(d, 2, keep_dims=True), square, 1)
    rest, square = convert_sums_to_moments(length, rest, square)
    rstd = approximate_rsqrt(square / length + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, pivot + rest, mask=row_mask)
        tl.store(rstd_ptr + row, rstd, mask=row_mask)

    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    store_normalised_tile(
        h, pivot, rest, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, mask,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale, negative_slope,
        VEC, ALIGNED, False, ACTIVATION, DROPOUT,
    )  # fmt: skip
