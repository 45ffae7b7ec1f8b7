"""Reduction of partial moments in a fixed order.

Partial results of every GroupNorm algorithm are float32 [N, splits, columns] each: means, their rests, and sums of
squared deviations from mean + rest.  A column is a channel or, if groups are contiguous, a whole group.
"""

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import can_start_early
from fusednorm.integers import next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.moments import compute_mean_term, convert_moments_to_sums, convert_sums_to_moments
from fusednorm.launch.launches import Launch, make_early_options

REDUCE_BLOCK, REDUCE_NUM_WARPS = 512, 4
"""Elements of a tile, and warps, of the kernel that reduces partial results of one group."""


def plan_moment_reduction(
    parts: tuple[Array, Array, Array],
    splits: int,
    mean: Array,
    rstd: Array,
    eps: float,
    group_columns: int,
    split_length: int,
    column_length: int,
    mean_rest: Array | None = None,
) -> Launch:
    """Plan the launch that merges partial moments of columns into mean and rstd of every group.

    A column is a channel or, if groups are contiguous, a whole group.  If `mean_rest` is given, it gets the
    rounding error of the mean.

    Args:
        parts: means, their rests, and sums of squared deviations, [N, splits, columns] each.
        split_length: values of a column in each split except the last.
        column_length: values of a column in all splits.
    """
    arguments = (
        *parts, mean, mean_rest, rstd, mean.shape[1], group_columns, splits, split_length, column_length, eps
    )  # fmt: skip
    options = {
        **choose_reduction_tile(splits, group_columns),
        **make_early_options(can_start_early(mean.device)),
    }
    return Launch(group_norm_reduce_moments_kernel, (mean.numel(),), arguments, options)


def choose_reduction_tile(splits: int, columns: int) -> dict[str, int]:
    """Choose the tile in which a program reads one group's partial results: splits, columns, and warps.

    The tile is as wide as the group's columns, up to 64.
    """
    block_columns = min(64, next_power_of_2(columns))
    block_splits = min(REDUCE_BLOCK // block_columns, next_power_of_2(splits))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": REDUCE_NUM_WARPS,
    }


@triton.jit
def reduce_to_mean_and_variance(
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    first_column,
    group_columns,
    columns,
    splits,
    split_length,
    column_length,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Merge the partial moments of one group of one sample.  Return the group's mean, in two parts
    (mean + rest), and its population variance.

    The results are scalars.  The mean is mean + rest, as in `merge_moments`.

    Args:
        mean_part_ptr, rest_part_ptr, square_part_ptr: the partial results of the sample, [splits, columns].
        first_column, group_columns: the group's columns.
        split_length: values of a column in each split except the last.
        column_length: values of a column in all splits.
    """
    split = tl.arange(0, BLOCK_SPLITS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = (column_length * group_columns).to(tl.float32)

    rough = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    for first_split in range(0, splits, BLOCK_SPLITS):
        s = first_split + split
        length = tl.minimum(split_length, column_length - s * split_length).to(tl.float32)
        for first in range(0, group_columns, BLOCK_COLUMNS):
            mask = (s < splits) & (first + column < group_columns)
            at = s.to(tl.int64) * columns + (first_column + first + column)
            part = tl.load(mean_part_ptr + at, mask=mask, other=0.0)
            part_rest = tl.load(rest_part_ptr + at, mask=mask, other=0.0)
            rough += compute_mean_term(length, part, part_rest, total)
    rough = tl.sum(tl.sum(rough, 1), 0)

    weighted = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    square = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    for first_split in range(0, splits, BLOCK_SPLITS):
        s = first_split + split
        length = tl.minimum(split_length, column_length - s * split_length).to(tl.float32)
        for first in range(0, group_columns, BLOCK_COLUMNS):
            mask = (s < splits) & (first + column < group_columns)
            at = s.to(tl.int64) * columns + (first_column + first + column)
            part = tl.load(mean_part_ptr + at, mask=mask, other=0.0)
            part_rest = tl.load(rest_part_ptr + at, mask=mask, other=0.0)
            part_square = tl.load(square_part_ptr + at, mask=mask, other=0.0)
            count = tl.where(mask, length, 0.0)
            sum_1, sum_2 = convert_moments_to_sums(rough, count, part, part_rest, part_square)
            weighted += sum_1
            square += sum_2
    rest, square = convert_sums_to_moments(total, tl.sum(tl.sum(weighted, 1), 0), tl.sum(tl.sum(square, 1), 0))
    return rough, rest, square / total


@triton.jit(do_not_specialize=["groups", "group_columns", "splits", "split_length", "column_length"])
def group_norm_reduce_moments_kernel(
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    mean_ptr,
    rest_ptr,
    rstd_ptr,
    groups: tl.int32,
    group_columns: tl.int32,
    splits: tl.int32,
    split_length: tl.int64,
    column_length: tl.int64,
    eps: tl.float32,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the partial moments of each group, and write the group's mean and rstd.  Each program has one group.

    If rest_ptr is not None, the rounding error of the mean is written too.
    """
    allow_next_launch(EARLY)
    await_previous_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    sample = row // groups
    columns = groups.to(tl.int64) * group_columns
    mean, rest, variance = reduce_to_mean_and_variance(
        mean_part_ptr + sample * splits * columns,
        rest_part_ptr + sample * splits * columns,
        square_part_ptr + sample * splits * columns,
        (row - sample * groups) * group_columns,
        group_columns,
        columns,
        splits,
        split_length,
        column_length,
        BLOCK_SPLITS,
        BLOCK_COLUMNS,
    )
    rounded = mean + rest
    tl.store(mean_ptr + row, rounded)
    if rest_ptr is not None:
        tl.store(rest_ptr + row, (mean - rounded) + rest)
    tl.store(rstd_ptr + row, approximate_rsqrt(variance + eps))
