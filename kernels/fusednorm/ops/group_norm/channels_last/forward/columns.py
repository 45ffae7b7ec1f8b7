"""Forward pass of blocks of channels-last columns: a kernel for moments of channels, then a kernel for y.

No program waits for another.

A program owns a block of columns (channels) and processes positions in tiles [ROWS, CV, VEC]: VEC channels are one
128-bit access of one thread, and a thread has the same channels at all positions, so it loads parameters and
statistics once.  A tile may hold groups of any width: moments are per channel and reduced to groups at the end.

Each row of a tile has its own pivot of a channel; as in the contiguous kernels, with n values per row of the tile
the error from cancellation is at most n * 2^-24 of the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array, new_workspace
from fusednorm.devices.device_properties import can_start_early
from fusednorm.integers import cdiv
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import load_residual_sum
from fusednorm.jit.moments import merge_moments
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.affine_step import load_slope_and_offset
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.moment_reduction import plan_moment_reduction
from fusednorm.ops.group_norm.sample_shape import (
    SampleShape,
    allocate_statistics,
    allocate_triple,
    compute_access_width,
)


@triton.jit
def compute_channel_moments(
    x_ptr,
    residual_ptr,
    first_row,
    last_row,
    row_stride,
    column,
    column_mask,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute the moments of each column of a block, [1, CV, VEC] each.  They are the mean, in two parts
    (mean + rest), and the sum of squared deviations.

    A column's values are those at the positions first_row <= row < last_row.

    Args:
        x_ptr, residual_ptr: the sample's first element.
        column: [1, CV, VEC] int32.
        column_mask: [1, CV, 1], which vectors of columns exist.
    """
    STEP: tl.constexpr = ROWS * UNROLL
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    rows = last_row - first_row
    mask = (row < rows) & column_mask
    offset = first_row * row_stride + at
    pivot = load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_last")
    sum_1 = tl.zeros(at.shape, tl.float32)
    sum_2 = tl.zeros(at.shape, tl.float32)
    full = rows // STEP
    for step in range(0, full):
        for k in tl.static_range(UNROLL):
            start = first_row + step * STEP + k * ROWS
            offset = start * row_stride + at
            d = load_residual_sum(x_ptr, residual_ptr, offset, column_mask, "evict_last") - pivot
            sum_1 += d
            sum_2 += d * d
    for tail in range(first_row + full * STEP, last_row, ROWS):
        mask = (tail + row < last_row) & column_mask
        offset = tail * row_stride + at
        h = load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_last")
        d = tl.where(mask, h - pivot, 0.0)
        sum_1 += d
        sum_2 += d * d

    count = ((rows + (ROWS - 1) - row) // ROWS).to(tl.float32)
    total = rows.to(tl.float32)
    shift = sum_1 / tl.maximum(count, 1.0)
    return merge_moments(count, pivot, shift, sum_2 - sum_1 * shift, total, 0)


@triton.jit
def normalise_positions(
    x_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    mean,
    scale,
    bias,
    sample,
    first_row,
    last_row,
    row_stride,
    column,
    column_mask,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of the positions first_row <= row < last_row of a block of columns, last positions first.

    y is act((h - mean) * scale + bias) with dropout; h, x + residual, is stored too if wanted.  A step of
    UNROLL tiles starts with all its loads, so that they overlap, and then holds one tile at a time in
    float32.  `mean`, `scale` and `bias` are [1, CV, VEC]; pointers are the sample's.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    STEP: tl.constexpr = ROWS * UNROLL
    steps = tl.cdiv(last_row - first_row, STEP)
    for step in range(0, steps):
        start = first_row + (steps - 1 - step) * STEP
        tiles = ()
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            tiles = tiles + (load_residual_sum(x_ptr, residual_ptr, offset, mask, "evict_first"),)
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            h = tiles[k]
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + offset, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            z = (h - mean) * scale + bias
            y = activate_for_dtype(z, negative_slope, y_ptr.dtype.element_ty, ACTIVATION)
            if DROPOUT:
                keep = compute_keep_mask(seed, sample, offset, dropout_threshold)
                y = tl.where(keep, y * dropout_scale, 0.0)
            tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def load_column_statistic(ptr, group, column_mask):
    """Load the float32 statistic of each column's group; `group` is the offset of that group's statistic."""
    return tl.load(ptr + group, mask=column_mask, other=0.0)


@triton.jit
def locate_columns(first_unit, end_unit, CV: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr):
    """Compute the column indices of CV vectors, [1, CV, VEC], and the mask of vectors that exist, [1, CV, 1].

    The vectors are those from `first_unit` on; those before `end_unit` exist.  If all do (EVEN), the mask is
    a constant that the compiler removes.
    """
    unit = first_unit + tl.arange(0, CV)[None, :, None]
    column = unit * VEC + tl.arange(0, VEC)[None, None, :]
    if EVEN:
        mask = tl.full(unit.shape, True, tl.int1)
    else:
        mask = unit < end_unit
    return column, mask


@dataclass(frozen=True, slots=True)
class ForwardColumnSplit(GroupNormForwardConfig):
    """A configuration in which no program waits for another.  Three kernels compute the moments of columns,
    the mean and rstd of groups, and y.

    In the kernels for moments and for y, a program has a range of positions of `block_columns` columns.  For
    moments it has `split_rows` positions in tiles of `tile_rows`, `unroll` tiles per step; for y it has
    `range_rows` positions in tiles of `apply_rows`.

    It is the only algorithm for C above 512 vectors (2048 channels in float32, 4096 in 16 bits, fewer if C
    is not a multiple of a vector) if a block does not fit one program, and programs may not or cannot share
    it.  For all channels-last samples, it computes mean and rstd for a backward pass if they were not saved.
    """

    block_columns: int
    tile_rows: int
    unroll: int
    split_rows: int
    apply_rows: int
    range_rows: int
    num_warps: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the launches for moments of columns, their reduction to mean and rstd, and y."""
        sample, out = call.sample, call.out
        if out.mean is None or out.rstd is None:
            mean, rstd = allocate_statistics(call.x, sample)
        else:
            mean, rstd = out.mean, out.rstd
        rest = new_workspace(call.x, *mean.shape)
        blocks = cdiv(sample.c, self.block_columns)
        runs = cdiv(sample.hw, self.range_rows)
        tile = self._make_tile_options(sample, call.x.element_size())
        arguments = (
            *call.tensors, mean, rest, rstd, sample.hw, sample.c // tile["VEC"], sample.groups,
            sample.group_channels, runs, self.range_rows, blocks, call.affine.sample_stride,
            *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "ROWS": self.apply_rows,
            **tile,
            **make_early_options(call.can_start_early),
            **call.options.constexprs,
        }
        return [
            *self.plan_statistics(call.x, sample, call.options.eps, call.residual, mean, rstd, rest),
            Launch(group_norm_nhwc_forward_columns_apply_kernel, (call.n * runs * blocks,), arguments, options),
        ]

    def plan_statistics(
        self,
        x: Array,
        sample: SampleShape,
        eps: float,
        residual: Array | None,
        mean: Array,
        rstd: Array,
        mean_rest: Array | None = None,
    ) -> list[Launch]:
        """Plan the launches that compute mean and rstd, without y.

        The first computes moments of each column over splits of the positions; the second merges them.

        If `mean_rest` is given, it gets the rounding error of the mean.
        """
        splits = cdiv(sample.hw, self.split_rows)
        blocks = cdiv(sample.c, self.block_columns)
        tile = self._make_tile_options(sample, x.element_size())
        parts = allocate_triple(x, x.shape[0], splits, sample.c)
        arguments = (
            x, residual, *parts, sample.hw, sample.c // tile["VEC"], splits, self.split_rows, blocks
        )  # fmt: skip
        options = {
            "ROWS": self.tile_rows,
            "UNROLL": self.unroll,
            "EARLY": can_start_early(x.device),
            **tile,
        }
        grid = (x.shape[0] * splits * blocks,)
        return [
            Launch(group_norm_nhwc_forward_columns_moments_kernel, grid, arguments, options),
            plan_moment_reduction(
                parts, splits, mean, rstd, eps, sample.group_channels, self.split_rows, sample.hw, mean_rest
            ),
        ]

    def _make_tile_options(self, sample: SampleShape, itemsize: int) -> Mapping[str, int]:
        """Make the launch options that the kernels for moments and for y have in common.

        The options are vector width, vectors of a block, whether all blocks are full, and number of warps.
        """
        vec = compute_access_width(itemsize, sample.c)
        return {
            "VEC": vec,
            "CV": self.block_columns // vec,
            "EVEN": sample.c % self.block_columns == 0,
            "num_warps": self.num_warps,
        }


@triton.jit(do_not_specialize=["hw", "column_units", "splits", "split_rows", "blocks"])
def group_norm_nhwc_forward_columns_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    splits: tl.int32,
    split_rows: tl.int64,
    blocks: tl.int32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute partial moments of columns.  Each program has one block of columns and one split of the positions.

    The moments are written to [N, splits, C]: mean, its rounding error (rest), and sum of squared
    deviations.
    """
    allow_next_launch(EARLY)
    program = tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    split = run - sample * splits
    c = column_units * VEC
    column, column_mask = locate_columns(block * CV, column_units, CV, VEC, EVEN)
    base = sample * hw * c
    first_row = split * split_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    mean, rest, square = compute_channel_moments(
        x_ptr, residual_ptr, first_row, tl.minimum(first_row + split_rows, hw), c.to(tl.int64),
        column, column_mask, ROWS, UNROLL,
    )  # fmt: skip
    tl.store(mean_part_ptr + run * c + column, mean, mask=column_mask)
    tl.store(rest_part_ptr + run * c + column, rest, mask=column_mask)
    tl.store(square_part_ptr + run * c + column, square, mask=column_mask)


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "runs", "run_rows", "blocks"])
def group_norm_nhwc_forward_columns_apply_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rest_ptr,
    rstd_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    runs: tl.int32,
    run_rows: tl.int64,
    blocks: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write y.  Each program handles one range of `run_rows` positions, in one block of columns.

    The last range is processed first, because it is still in the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // runs
    c = column_units * VEC
    column, column_mask = locate_columns(block * CV, column_units, CV, VEC, EVEN)
    group = sample * groups + column // channels
    base = sample * hw * c
    first_row = (run - sample * runs) * run_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
        residual_out_ptr += base

    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    weight, bias = load_slope_and_offset(parameters, column, sample * scale_stride + column, column_mask)
    await_previous_launch(EARLY)
    scale = load_column_statistic(rstd_ptr, group, column_mask) * weight
    bias -= load_column_statistic(rest_ptr, group, column_mask) * scale
    normalise_positions(
        x_ptr, residual_ptr, y_ptr + base, residual_out_ptr,
        load_column_statistic(mean_ptr, group, column_mask), scale, bias,
        sample, first_row, tl.minimum(first_row + run_rows, hw), c.to(tl.int64), column, column_mask,
        seed, dropout_threshold, dropout_scale, negative_slope, ROWS, 1, ACTIVATION, DROPOUT,
    )  # fmt: skip
