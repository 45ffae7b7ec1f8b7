"""Backward pass of blocks of channels-last columns whose programs wait for nothing: sums first, then dx.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradient_tiles`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.reductions import multiply_rounded, sum_pair
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.backward_split import (
    plan_split_backward_launches,
    store_fragment_gradients,
    sum_fragment_gradients,
)
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.column_blocks import (
    count_max_overlaps,
    load_group_statistic,
    make_vector_mask,
)
from fusednorm.ops.group_norm.gradient_tiles import load_scaled_slope_and_offset
from fusednorm.ops.group_norm.sample_shape import compute_access_width

_SIZES = ["splits", "blocks", "fragments", "hw", "column_units", "groups", "channels", "seed", "dropout_threshold"]


@dataclass(frozen=True, slots=True)
class BackwardColumnSplit(GroupNormBackwardConfig):
    """A configuration in which no program waits for another.  One kernel computes sums, then another kernel
    computes dx.

    In both kernels, a program has a range of positions of `columns` columns, a power of two.  A range is
    `fragments` fragments of `chunks` tiles; a tile has one vector per thread.

    It is the only algorithm for C above 512 vectors (see `ForwardColumnSplit`) if programs may not wait for
    one another, if C is not a multiple of 16 bytes, or if samples are too large to share.
    """

    columns: int
    chunks: int
    fragments: int
    num_warps: int

    def count_tile_rows(self, vec: int) -> int:
        """Return the number of positions of a tile of vectors of `vec` elements."""
        return 32 * self.num_warps * vec // self.columns

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launches for sums of columns, their reduction to groups, dx, and parameter gradients."""
        sample = call.sample
        vec = compute_access_width(call.x.element_size(), sample.c)
        range_rows = self.fragments * self.chunks * self.count_tile_rows(vec)
        splits = cdiv(sample.hw, range_rows)
        blocks = cdiv(sample.c, self.columns)
        shape = (
            splits, blocks, self.fragments, sample.hw, sample.c // vec, sample.groups, sample.group_channels,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "GROUP": vec,
            "LANES": 32 * self.num_warps,
            "CV": self.columns // vec,
            "CHUNKS": self.chunks,
            "EVEN": sample.c % self.columns == 0 and sample.hw % range_rows == 0,
            "LABELS": count_max_overlaps(sample.group_channels, vec),
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        kernels = group_norm_nhwc_backward_columns_sums_kernel, group_norm_nhwc_backward_columns_apply_kernel
        return plan_split_backward_launches(call, kernels, (call.n * splits * blocks,), shape, options, splits)


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nhwc_backward_columns_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    splits: tl.int32,
    blocks: tl.int32,
    fragments: tl.int32,
    hw: tl.int64,
    column_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CV: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    LABELS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum dz and dz * x_hat of each column.  A program sums over one range of positions, in a block of columns
    that is CV vectors wide.

    The sums are written to [N, splits, C]; a range is `fragments` fragments of CHUNKS tiles.  Here, dz is
    the gradient of the affine step's output.
    """
    allow_next_launch(EARLY)
    ROWS: tl.constexpr = LANES // CV
    RUN: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = CV * GROUP
    c = column_units * GROUP
    block = tl.program_id(0) % blocks
    split = (tl.program_id(0) // blocks) % splits
    sample = tl.program_id(0) // (blocks * splits)
    lane = tl.arange(0, LANES)[:, None]
    row = lane // CV
    vector = lane % CV
    block_first = block * WIDTH
    vector_first = block_first + vector * GROUP
    lane_column = vector * GROUP + tl.arange(0, GROUP)[None, :]
    vector_group = vector_first // channels
    group_index = (block_first + lane_column) // channels - vector_group
    columns = make_vector_mask(vector, CV, vector_first, c, EVEN)
    mean = load_group_statistic(mean_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS)
    channel = block_first + lane_column
    slope, offset = load_scaled_slope_and_offset(
        parameters, channel, sample * scale_stride + channel, columns, GAIN
    )
    first = split.to(tl.int64) * fragments * RUN
    sum_dz, sum_dz_centred = sum_fragment_gradients(
        dy_ptr, x_ptr, residual_ptr, sample, block_first, first, fragments, hw, c, (lane_column, row, columns),
        mean, slope, rstd, offset, (seed, dropout_threshold, dropout_scale, negative_slope),
        LANES, GROUP, ROWS, CHUNKS, EVEN,
        True, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
    sum_dz_xhat = multiply_rounded(sum_dz_centred, rstd)
    channel_dz, channel_dz_xhat = sum_pair(
        tl.reshape(sum_dz, (ROWS, WIDTH)), tl.reshape(sum_dz_xhat, (ROWS, WIDTH)), 0
    )
    block_column = block_first + tl.arange(0, WIDTH)[None, :]
    slot = (sample * splits + split) * c + block_column
    tl.store(dz_part_ptr + slot, channel_dz * (1.0 / GAIN), mask=block_column < c)
    tl.store(dz_xhat_part_ptr + slot, channel_dz_xhat * (1.0 / GAIN), mask=block_column < c)


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nhwc_backward_columns_apply_kernel(
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
    splits: tl.int32,
    blocks: tl.int32,
    fragments: tl.int32,
    hw: tl.int64,
    column_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CV: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    LABELS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx.  Each program handles one range of positions, in a block of columns that is CV vectors wide.

    The ranges that the kernel for sums read last are processed first: they are still in the cache.
    """
    allow_next_launch(EARLY)
    ROWS: tl.constexpr = LANES // CV
    RUN: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = CV * GROUP
    c = column_units * GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    split = (program // blocks) % splits
    sample = program // (blocks * splits)
    lane = tl.arange(0, LANES)[:, None]
    row = lane // CV
    vector = lane % CV
    block_first = block * WIDTH
    vector_first = block_first + vector * GROUP
    lane_column = vector * GROUP + tl.arange(0, GROUP)[None, :]
    vector_group = vector_first // channels
    group_index = (block_first + lane_column) // channels - vector_group
    columns = make_vector_mask(vector, CV, vector_first, c, EVEN)
    mean = load_group_statistic(mean_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS)
    channel = block_first + lane_column
    slope, offset = load_scaled_slope_and_offset(
        parameters, channel, sample * scale_stride + channel, columns, GAIN
    )
    await_previous_launch(EARLY)
    sum_g = load_group_statistic(sum_g_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS)
    sum_g_xhat = load_group_statistic(
        sum_g_xhat_ptr, sample * groups, vector_group, groups - 1, group_index, LABELS
    )
    scale = slope * rstd
    inverse_size = 1.0 / (channels * hw).to(tl.float32)
    constant = sum_g * inverse_size * rstd
    factor = sum_g_xhat * inverse_size * rstd * rstd
    first = split.to(tl.int64) * fragments * RUN
    store_fragment_gradients(
        dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr, sample, block_first, first, fragments, hw, c,
        (lane_column, row, columns), mean, scale, offset, constant, factor,
        (seed, dropout_threshold, dropout_scale, negative_slope), ROWS, CHUNKS, EVEN,
        True, ACTIVATION, DROPOUT, GAIN,
    )  # fmt: skip
