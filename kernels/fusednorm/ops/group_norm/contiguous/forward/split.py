"""Forward pass of contiguous groups whose parts several programs read: a kernel for moments, then a kernel for y.

No program waits for another.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import can_start_early
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.contiguous.group_ranges import compute_range_moments, normalise_range
from fusednorm.ops.group_norm.moment_reduction import (
    REDUCE_BLOCK,
    plan_moment_reduction,
    reduce_to_mean_and_variance,
)
from fusednorm.ops.group_norm.sample_shape import WIDE_GROUP, SampleShape, allocate_triple, compute_access_width


@dataclass(frozen=True, slots=True)
class GroupNormForwardSplit(GroupNormForwardConfig):
    """A configuration in which no program waits for another.  One kernel computes moments of parts of groups,
    then another kernel writes y.

    A part is `split_vectors` vectors of a contiguous group.  For y, a program has `program_vectors` vectors.
    Both kernels read tiles of `tile_vectors` vectors.

    It is the only algorithm for groups above 256 KiB if programs may not wait for one another, or if all
    programs together cannot hold a group (on 132 multiprocessors from about 2**22 16-bit or 2**20 float32
    elements on, fewer with fused operations).  For all contiguous groups, it computes mean and rstd for a
    backward pass if they were not saved.
    """

    tile_vectors: int
    split_vectors: int
    program_vectors: int
    num_warps: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the launch for moments of parts of groups, and the launch that merges them and writes y."""
        parts, splits, partial = self._plan_partial_moments(call.x, call.sample, call.residual)
        programs = cdiv(call.group_vectors, self.program_vectors)
        arguments = (
            *call.tensors, *parts, *call.statistics, call.group_vectors, *call.channel_indexing,
            splits, self.split_vectors, programs, self.program_vectors,
            call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "BLOCK_SPLITS": min(REDUCE_BLOCK, next_power_of_2(splits)),
            "WIDE": call.sample.group_length >= WIDE_GROUP,
            **make_early_options(call.can_start_early),
            **call.make_contiguous_options(self.tile_vectors, self.num_warps),
        }
        grid = (call.n * call.sample.groups * programs,)
        return [partial, Launch(group_norm_nchw_forward_split_apply_kernel, grid, arguments, options)]

    def plan_statistics(
        self, x: Array, sample: SampleShape, eps: float, residual: Array | None, mean: Array, rstd: Array
    ) -> list[Launch]:
        """Plan the launches that compute mean and rstd, without y.

        The first computes moments of parts of groups; the second merges them.
        """
        vec = compute_access_width(x.element_size(), sample.group_length)
        parts, splits, partial = self._plan_partial_moments(x, sample, residual)
        reduce = plan_moment_reduction(
            parts, splits, mean, rstd, eps, 1, self.split_vectors * vec, sample.group_length
        )
        return [partial, reduce]

    def _plan_partial_moments(
        self, x: Array, sample: SampleShape, residual: Array | None
    ) -> tuple[tuple[Array, Array, Array], int, Launch]:
        """Plan the launch that computes the moments of the parts of each contiguous group.

        Returns the moments, [N, splits, groups] each, the number of splits, and the launch.
        """
        vec = compute_access_width(x.element_size(), sample.group_length)
        group_units = sample.group_length // vec
        splits = cdiv(group_units, self.split_vectors)
        parts = allocate_triple(x, x.shape[0], splits, sample.groups)
        arguments = (
            x, residual, *parts, group_units, sample.groups, sample.group_channels, splits, self.split_vectors
        )  # fmt: skip
        options = {
            "VEC": vec,
            "UNITS": self.tile_vectors,
            "WIDE": sample.group_length >= WIDE_GROUP,
            "EARLY": can_start_early(x.device),
            "num_warps": self.num_warps,
        }
        grid = (x.shape[0] * sample.groups * splits,)
        return parts, splits, Launch(group_norm_nchw_forward_split_moments_kernel, grid, arguments, options)


@triton.jit(do_not_specialize=["group_units", "groups", "channels", "splits", "split_units"])
def group_norm_nchw_forward_split_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    split_units: tl.int64,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute the moments of parts of groups, called splits.  Each program has one split of one group.

    The moments are written to [N, splits, G]: mean, its rounding error (rest), and sum of squared
    deviations.
    """
    allow_next_launch(EARLY)
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
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    mean, rest, square = compute_range_moments(x_ptr, residual_ptr, first, last, VEC, UNITS)
    slot = (sample * splits + split) * groups + (row - sample * groups) + tl.zeros((1, 1, 1), tl.int32)
    tl.store(mean_part_ptr + slot, mean)
    tl.store(rest_part_ptr + slot, rest)
    tl.store(square_part_ptr + slot, square)


@triton.jit(
    do_not_specialize=[
        "group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride", "splits",
        "split_units",
        "programs_a_group", "program_units",
    ]
)  # fmt: skip
def group_norm_nchw_forward_split_apply_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_part_ptr,
    rest_part_ptr,
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
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write y.  Each program merges the moments of one group's splits, then writes one range of the group's
    vectors.

    The last range is processed first, because it is still in the cache.
    """
    await_previous_launch(EARLY)
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = program // programs_a_group
    part = program - row * programs_a_group
    sample = row // groups
    mean, rest, variance = reduce_to_mean_and_variance(
        mean_part_ptr + sample * splits * groups,
        rest_part_ptr + sample * splits * groups,
        square_part_ptr + sample * splits * groups,
        row - sample * groups,
        1,
        groups,
        splits,
        split_units * VEC,
        group_units * VEC,
        BLOCK_SPLITS,
        1,
    )
    rstd = approximate_rsqrt(variance + eps)
    if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
        if part == 0:
            tl.store(mean_ptr + row, mean + rest)
            tl.store(rstd_ptr + row, rstd)
    first = part * program_units
    last = tl.minimum(first + program_units, group_units)
    if not WIDE:
        first = first.to(tl.int32)
        last = last.to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    normalise_range(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rest, rstd, row, first, last,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale, negative_slope,
        VEC, UNITS, ALIGNED, WIDE, ACTIVATION, DROPOUT,
    )  # fmt: skip
