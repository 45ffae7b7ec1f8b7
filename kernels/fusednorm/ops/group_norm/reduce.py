"""Reduction of partial moments in a fixed order.

Partial results of every GroupNorm algorithm are float32 [N, splits, columns]; a column is a channel or, if groups
are contiguous, a whole group.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusednorm.devices.device import INTERPRETED, since_hopper
from fusednorm.integers import next_power_of_2
from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.jit.reductions import rounded_product
from fusednorm.launch.launch import Launch, dependent

REDUCE_BLOCK, REDUCE_NUM_WARPS = 512, 4
"""Elements of a tile, and warps, of the kernel that reduces partial results of one group."""


def moments_reduction(
    parts: tuple[Tensor, Tensor],
    splits: int,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    group_columns: int,
    split_length: int,
    column_length: int,
) -> Launch:
    """The launch that computes mean and rstd of every group from partial results of its columns."""
    arguments = (
        *parts, mean, rstd, mean.shape[1], group_columns, splits, split_length, column_length, eps
    )  # fmt: skip
    options = {
        **reduction_tile(splits, group_columns),
        **dependent(since_hopper(mean.device)),
        "FAST": not INTERPRETED,
    }
    return Launch(group_norm_reduce_moments_kernel, (mean.numel(),), arguments, options)


def reduction_tile(splits: int, columns: int) -> dict[str, int]:
    """The tile for the reduction of one group's partial results; as wide as its columns if they fit."""
    block_columns = min(64, next_power_of_2(columns))
    block_splits = min(REDUCE_BLOCK // block_columns, next_power_of_2(splits))
    return {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": REDUCE_NUM_WARPS,
    }


@triton.jit
def reduce_moments(
    mean_part_ptr,
    square_part_ptr,
    first_column,
    group_columns,
    columns,
    splits,
    split_length,
    column_length,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Mean and population variance of one group of one sample by Chan's formula; scalars.

    Args:
        mean_part_ptr, square_part_ptr: [splits, columns] of the sample; means and sums of squared deviations.
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
            rough += rounded_product(length / total + tl.zeros_like(part), part, FAST)
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
            delta = tl.where(mask, part - rough, 0.0)
            weighted += length * delta
            square += tl.load(square_part_ptr + at, mask=mask, other=0.0) + length * delta * delta
    shift = tl.sum(tl.sum(weighted, 1), 0) / total
    variance = tl.sum(tl.sum(square, 1), 0) / total - shift * shift
    # maximum would lose a NaN.
    return rough + shift, tl.where(variance < 0.0, 0.0, variance)


@triton.jit(do_not_specialize=["groups", "group_columns", "splits", "split_length", "column_length"])
def group_norm_reduce_moments_kernel(
    mean_part_ptr,
    square_part_ptr,
    mean_ptr,
    rstd_ptr,
    groups: tl.int32,
    group_columns: tl.int32,
    splits: tl.int32,
    split_length: tl.int64,
    column_length: tl.int64,
    eps: tl.float32,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per group: writes its mean and rstd."""
    let_next_start(EARLY)
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    sample = row // groups
    columns = groups.to(tl.int64) * group_columns
    mean, variance = reduce_moments(
        mean_part_ptr + sample * splits * columns,
        square_part_ptr + sample * splits * columns,
        (row - sample * groups) * group_columns,
        group_columns,
        columns,
        splits,
        split_length,
        column_length,
        BLOCK_SPLITS,
        BLOCK_COLUMNS,
        FAST,
    )
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(variance + eps))
