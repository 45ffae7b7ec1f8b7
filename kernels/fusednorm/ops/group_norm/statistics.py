"""Mean and rstd alone, and the forward pass that computes them first; programs split groups and do not wait."""

from functools import lru_cache

from fusednorm.arguments.arrays import Array
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumnSplit
from fusednorm.ops.group_norm.contiguous.forward.split import GroupNormForwardSplit
from fusednorm.ops.group_norm.sample_shape import (
    SampleShape,
    choose_block_columns,
    compute_access_width,
    compute_max_splits,
)


@lru_cache(maxsize=4096)
def find_split_forward(sample: SampleShape, itemsize: int) -> GroupNormForwardSplit | ForwardColumnSplit:
    """Find the forward configuration in which no program waits for another, for groups of any size.

    The configuration has a kernel for the moments of parts of groups, then a kernel for y.
    """
    if sample.channels_last:
        return _find_column_split(sample, itemsize)
    vec = compute_access_width(itemsize, sample.group_length)
    tile = count_sweep_vectors(vec)
    tiles = -(-sample.group_length // (vec * tile * compute_max_splits(sample.groups)))
    return GroupNormForwardSplit(tile, tile * max(2, tiles), 2 * tile, 16)


def plan_statistics(
    x: Array, sample: SampleShape, eps: float, residual: Array | None, mean: Array, rstd: Array
) -> list[Launch]:
    """Plan the launches that compute mean and rstd, for a backward pass that needs them but was given none."""
    return find_split_forward(sample, x.element_size()).plan_statistics(x, sample, eps, residual, mean, rstd)


def count_sweep_vectors(vec: int) -> int:
    """Return the vectors of a tile of 16 warps: 16 elements per thread, or 8 if each access has one element."""
    return 8192 // vec if vec > 1 else 4096


def _find_column_split(sample: SampleShape, itemsize: int) -> ForwardColumnSplit:
    """Find the configuration of `find_split_forward` for channels-last samples.

    The splits are so long that their number is at most `compute_max_splits`, for any number of positions.
    """
    vec = compute_access_width(itemsize, sample.c)
    width = choose_block_columns(sample, itemsize)
    rows = max(1, 32 * 8 * vec // width)
    step = rows * 4
    split_rows = step * max(2, -(-sample.hw // (step * compute_max_splits(sample.c))))
    return ForwardColumnSplit(width, rows, 4, split_rows, rows * 2, rows * 8, 8)
