"""Launch configurations that may suit a sample in GroupNorm's backward pass: what tuning times.

Bounds on registers are estimates of what the compiler makes of a kernel; they leave out what cannot be fast, not
everything that is slow.
"""

from collections.abc import Iterator
from itertools import product

from fusednorm.group_norm_backward_launch import (
    MOST_LABELS,
    Backward,
    BackwardBlocks,
    BackwardColumns,
    BackwardShared,
    BackwardSplit,
    idle_share,
    most_touched,
)
from fusednorm.group_norm_launch import Sample, vector_width

MOST = 80
"""Configurations of one sample, the first of each list."""

_MULTIPROCESSORS = 132
"""Of an H200: programs that share groups must all be resident."""

_WASTE = 1.13
"""Of lanes, at most, unless nothing wastes less."""

_LAG_AHEAD = ((2, 1), (2, 2), (3, 1), (1, 1))


def candidates(sample: Sample, itemsize: int) -> Iterator[Backward]:
    """Configurations for such samples of elements of `itemsize` bytes, each once."""
    if sample.channels_last:
        yield from _blocks(sample, itemsize)
        yield from _columns(sample, itemsize)
    else:
        yield from _shared(sample, itemsize)
        yield from _splits(sample, itemsize)


def _shared(sample: Sample, itemsize: int) -> list[BackwardShared]:
    """The shapes of part that waste least, pieces and residency that fit, then lags."""
    fitting = [
        config
        for warps, resident_warps, chunks, pieces, channels in product(
            (4, 8), (12, 16, 20, 24), (1, 2, 3, 4, 5, 7), (1, 2, 4, 5, 8), (1, 2, 4, 8, 16)
        )
        if resident_warps % warps == 0
        and 64 + 8 * chunks <= 2048 // resident_warps
        and (resident_warps <= 16 or chunks <= 2)
        and (config := BackwardShared(channels, chunks, pieces, warps, resident_warps // warps, 2, 1)).fits(
            sample, itemsize, _MULTIPROCESSORS
        )
    ]
    least = min((config.padded_length(sample, itemsize) for config in fitting), default=0)
    lean = [config for config in fitting if config.padded_length(sample, itemsize) <= _WASTE * least]
    lean.sort(
        key=lambda config: (
            _preference(config, sample, itemsize)
            + 1.5 * (config.padded_length(sample, itemsize) > sample.group_length)
            + 0.1 * config.channels
        )
    )
    return [
        BackwardShared(c.channels, c.chunks, c.pieces, c.num_warps, c.programs_per_sm, lag, ahead)
        for c in lean[: MOST // len(_LAG_AHEAD)]
        for lag, ahead in _LAG_AHEAD
    ]


def _blocks(sample: Sample, itemsize: int) -> list[BackwardBlocks]:
    """Blocks of 64 to 256 bytes, and of whole groups, over slabs that fit."""
    vector = 16 // itemsize
    if sample.c % vector or most_touched(sample.channels, vector) > MOST_LABELS:
        return []
    widths = {size // itemsize for size in (64, 128, 256)}
    widths |= {groups * sample.channels for groups in range(1, sample.groups + 1)}
    fitting = [
        config
        for columns, warps, resident_warps, chunks, pieces in product(
            sorted(widths), (4, 8), (8, 12, 16), (1, 2, 4, 6), (1, 2, 4, 8)
        )
        if columns % vector == 0
        and 64 <= columns * itemsize <= 256
        and columns <= sample.c
        and resident_warps % warps == 0
        and 96 + 8 * chunks <= 2048 // resident_warps
        and (config := BackwardBlocks(columns, chunks, pieces, warps, resident_warps // warps, 2, 1)).fits(
            sample, itemsize, _MULTIPROCESSORS
        )
    ]
    fitting.sort(
        key=lambda config: (
            _preference(config, sample, itemsize)
            + 4 * config.padded_width(sample, itemsize) / sample.c
            + abs(config.columns * itemsize / 128 - 1.2)
        )
    )
    return [
        BackwardBlocks(c.columns, c.chunks, c.pieces, c.num_warps, c.programs_per_sm, lag, ahead)
        for c in fitting[: MOST // 4]
        for lag, ahead in ((2, 1), (2, 0), (1, 1), (3, 2))
    ]


def _preference(config: BackwardShared | BackwardBlocks, sample: Sample, itemsize: int) -> float:
    """Small for what is expected to be fast."""
    idle = idle_share(config, sample, itemsize, _MULTIPROCESSORS)
    return abs(config.chunks - 3) + 0.8 * abs(config.pieces - 1.5) + 0.5 * (config.num_warps > 4) + 5 * idle


def _splits(sample: Sample, itemsize: int) -> Iterator[BackwardSplit]:
    """Parts that waste least, of a few lengths."""
    shapes = [
        BackwardSplit(channels, chunks, pieces, warps)
        for channels, chunks, pieces, warps in product((1, 2, 4, 8), (2, 3, 4), (1, 2, 4, 8), (4, 8))
    ]
    work = [
        -(-sample.hw // shape.part_positions(itemsize)) * shape.part_positions(itemsize)
        * -(-sample.channels // shape.channels) * shape.channels
        for shape in shapes
    ]  # fmt: skip
    lean = [shape for shape, padded in zip(shapes, work, strict=True) if padded <= 1.03 * min(work)]
    yield from sorted(lean, key=lambda shape: shape.channels)[:24]


def _columns(sample: Sample, itemsize: int) -> Iterator[BackwardColumns]:
    """Blocks of 64 to 256 bytes."""
    vec = vector_width(itemsize, sample.c)
    for size, chunks, pieces, warps in product((64, 128, 256), (2, 4), (2, 4, 8), (4, 8)):
        config = BackwardColumns(size // itemsize, chunks, pieces, warps)
        if config.columns <= sample.c and chunks * pieces * config.rows(vec) <= sample.hw:
            yield config
