"""Mean and rstd alone, and the forward pass that computes them first: programs split groups and do not wait."""

from functools import lru_cache

from fusednorm.arguments.arrays import Array
from fusednorm.launch.launch import Launch
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumns
from fusednorm.ops.group_norm.contiguous.forward.split import ForwardSplit
from fusednorm.ops.group_norm.sample import Sample, column_width, max_splits, vector_width


@lru_cache(maxsize=4096)
def split_forward(sample: Sample, itemsize: int) -> ForwardSplit | ForwardColumns:
    """The forward configuration that splits groups of any size."""
    if sample.channels_last:
        return _columns(sample, itemsize)
    vec = vector_width(itemsize, sample.group_length)
    tile = sweep_units(vec)
    tiles = -(-sample.group_length // (vec * tile * max_splits(sample.groups)))
    return ForwardSplit(tile, tile * max(2, tiles), 2 * tile, 16)


def plan_statistics(
    x: Array, sample: Sample, eps: float, residual: Array | None, mean: Array, rstd: Array
) -> list[Launch]:
    """The launches that compute only mean and rstd, for a backward pass that needs them and has none."""
    return split_forward(sample, x.element_size()).statistics(x, sample, eps, residual, mean, rstd)


def sweep_units(vec: int) -> int:
    """Vectors of a tile of 16 warps: 16 elements per thread, or 8 if each element is a separate access."""
    return 8192 // vec if vec > 1 else 4096


def _columns(sample: Sample, itemsize: int) -> ForwardColumns:
    vec = vector_width(itemsize, sample.c)
    width = column_width(sample, itemsize)
    rows = max(1, 32 * 8 * vec // width)
    step = rows * 4
    split_rows = step * max(2, -(-sample.hw // (step * max_splits(sample.c))))
    return ForwardColumns(width, rows, 4, split_rows, rows * 2, rows * 8, 8)
