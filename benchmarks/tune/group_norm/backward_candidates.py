"""Launch configurations that may suit a GroupNorm backward pass; `benchmarks.tune.group_norm` times them.

Some 20 for a large sample, the most promising of each algorithm.  Limits on registers are estimates of the
compiler's results; they exclude configurations that cannot be fast, not all slow ones.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from typing import TypeVar

from fusednorm.ops.group_norm.backward_choice import (
    MOST_LABELS,
    choose_backward,
    find_backward_stream,
    find_split_backward,
)
from fusednorm.ops.group_norm.call import GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.backward.columns import BackwardColumnSplit
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.backward.sweep import BackwardBlockSweep
from fusednorm.ops.group_norm.channels_last.column_blocks import count_max_overlaps
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.contiguous.backward.split import GroupNormBackwardSplit
from fusednorm.ops.group_norm.contiguous.backward.sweep import GroupNormBackwardSweep
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width

Timed = TypeVar("Timed", GroupNormBackwardCooperative, BackwardCooperativeBlock)

_MULTIPROCESSORS = 132
"""Number on an H200: programs that share groups must all be resident."""

_WASTE = 1.13
"""Maximum ratio of lanes to elements, unless no shape wastes less."""

_SWEPT_BYTES = 80 << 10
"""Maximum size of a group or block that one program reads twice."""

_LAG_AHEAD = ((2, 1), (1, 1), (2, 2), (3, 1), (2, 0))
_LAGS_OF_SHAPES = (5, 3, 2, 1, 1, 1, 1)
"""Number of lags to try with the first shape of part, the second, and so on."""


def iterate_candidates(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormBackwardConfig]:
    """Configurations for `samples` samples of elements of `itemsize` bytes, each once; the table's choice first."""
    yield from dict.fromkeys(_iterate_all(sample, itemsize, samples))


def _iterate_all(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormBackwardConfig]:
    yield choose_backward(sample, itemsize, _MULTIPROCESSORS)
    yield find_split_backward(sample, itemsize)
    if sample.channels_last:
        yield from _iterate_swept_blocks(sample, itemsize)
        yield from _list_cooperative_blocks(sample, itemsize, samples)
        yield from _iterate_streams(sample, itemsize)
        yield from _iterate_columns(sample, itemsize)
    else:
        yield from _iterate_swept_groups(sample, itemsize)
        yield from _list_cooperative(sample, itemsize, samples)
        yield from _iterate_splits(sample, itemsize)


def _list_cooperative(sample: SampleShape, itemsize: int, samples: int) -> list[GroupNormBackwardCooperative]:
    """Shapes of part with little waste that are expected to be fast, with lags."""
    fitting = [
        config
        for warps, resident_warps, chunks, pieces, channels in product(
            (4, 8), (12, 16, 20, 24), (1, 2, 3, 4, 5, 7), (1, 2, 4, 5, 8), (1, 2, 4, 8, 16)
        )
        if resident_warps % warps == 0
        and 64 + 8 * chunks <= 2048 // resident_warps
        and (resident_warps <= 16 or chunks <= 2)
        and (
            config := GroupNormBackwardCooperative(channels, chunks, pieces, warps, resident_warps // warps, 2, 1)
        ).can_run(sample, itemsize, _MULTIPROCESSORS)
    ]
    least = min((config.compute_padded_length(sample, itemsize) for config in fitting), default=0)
    lean = [config for config in fitting if config.compute_padded_length(sample, itemsize) <= _WASTE * least]
    lean.sort(
        key=lambda config: (
            _estimate_cost(config, sample, itemsize, samples * sample.groups)
            + 1.5 * (config.compute_padded_length(sample, itemsize) > sample.group_length)
            + 0.1 * config.channels
        )
    )
    return _vary_lags(lean)


def _iterate_swept_groups(sample: SampleShape, itemsize: int) -> Iterator[GroupNormBackwardSweep]:
    """Groups that one program reads twice, in fragments that are at most half empty."""
    if sample.group_length * itemsize <= _SWEPT_BYTES:
        for channels, chunks in product((4, 8, 16), (2, 4)):
            fragment = chunks * 256 // channels * (16 // itemsize)
            if fragment < 2 * sample.hw and channels <= sample.group_channels:
                yield GroupNormBackwardSweep(channels, chunks, num_warps=8)


def _iterate_swept_blocks(sample: SampleShape, itemsize: int) -> Iterator[BackwardBlockSweep]:
    """Blocks of 64 to 320 bytes that one program reads twice."""
    if count_max_overlaps(sample.group_channels, 16 // itemsize) > MOST_LABELS:
        return
    for groups in range(1, sample.groups + 1):
        width = groups * sample.group_channels * itemsize
        if 64 <= width <= 320 and width % 16 == 0 and width * sample.hw <= _SWEPT_BYTES:
            yield BackwardBlockSweep(groups, num_warps=8)


def _list_cooperative_blocks(sample: SampleShape, itemsize: int, samples: int) -> list[BackwardCooperativeBlock]:
    """Blocks of 64 to 256 bytes, and of whole groups, over slabs that fit."""
    vector = 16 // itemsize
    if sample.c % vector or count_max_overlaps(sample.group_channels, vector) > MOST_LABELS:
        return []
    widths = {size // itemsize for size in (64, 128, 256)}
    widths |= {groups * sample.group_channels for groups in range(1, sample.groups + 1)}
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
        and (
            config := BackwardCooperativeBlock(columns, chunks, pieces, warps, resident_warps // warps, 2, 1)
        ).can_run(sample, itemsize, _MULTIPROCESSORS)
    ]
    fitting.sort(
        key=lambda config: (
            _estimate_cost(config, sample, itemsize, samples * _count_bundles(config, sample))
            + 4 * config.compute_padded_width(sample, itemsize) / sample.c
            + abs(config.columns * itemsize / 128 - 1.2)
        )
    )
    return _vary_lags(fitting)


def _vary_lags(shapes: list[Timed]) -> list[Timed]:
    """The first shapes that differ in a program's data, each with the number of lags for its rank."""
    chosen: dict[tuple[int, ...], Timed] = {}
    for config in shapes:
        chosen.setdefault((config.chunks, config.num_warps, config.programs_per_sm), config)
    return [
        replace(config, lag=lag, ahead=ahead)
        for config, lags in zip(chosen.values(), _LAGS_OF_SHAPES, strict=False)
        for lag, ahead in _LAG_AHEAD[:lags]
    ]


def _count_bundles(config: BackwardCooperativeBlock, sample: SampleShape) -> int:
    return ceil(sample.c / (config.count_bundle_blocks(sample) * config.columns))


def _estimate_cost(
    config: GroupNormBackwardCooperative | BackwardCooperativeBlock, sample: SampleShape, itemsize: int, units: int
) -> float:
    """A cost, small for a few chunks and pieces, and for few idle programs in the last wave."""
    programs = config.programs_per_sm * _MULTIPROCESSORS
    members = config.count_members(sample, itemsize)
    turns = ceil(units / (programs // members))
    idle = 1 - units * members / (turns * programs)
    return abs(config.chunks - 3) + 0.8 * abs(config.fragments - 1.5) + 0.5 * (config.num_warps > 4) + 5 * idle


def _iterate_splits(sample: SampleShape, itemsize: int) -> Iterator[GroupNormBackwardSplit]:
    """Parts of a few lengths with the least waste."""
    shapes = [
        GroupNormBackwardSplit(channels, chunks, pieces, warps)
        for channels, chunks, pieces, warps in product((1, 2, 4, 8), (2, 3, 4), (1, 2, 4, 8), (4, 8))
    ]
    work = [
        -(-sample.hw // shape.count_range_positions(itemsize)) * shape.count_range_positions(itemsize)
        * -(-sample.group_channels // shape.channels) * shape.channels
        for shape in shapes
    ]  # fmt: skip
    lean = [shape for shape, padded in zip(shapes, work, strict=True) if padded <= 1.03 * min(work)]
    yield from sorted(lean, key=lambda shape: shape.channels)[:4]


def _iterate_columns(sample: SampleShape, itemsize: int) -> Iterator[BackwardColumnSplit]:
    """Blocks of 64 to 256 bytes."""
    vec = compute_access_width(itemsize, sample.c)
    for size, chunks, pieces, warps in ((128, 4, 4, 4), (128, 2, 8, 8), (256, 4, 4, 8), (64, 4, 8, 4)):
        config = BackwardColumnSplit(size // itemsize, chunks, pieces, warps)
        if config.columns <= sample.c and chunks * pieces * config.count_tile_rows(vec) <= sample.hw:
            yield config


def _iterate_streams(sample: SampleShape, itemsize: int) -> Iterator[BackwardSampleStream]:
    """All columns of a position side by side."""
    usual = find_backward_stream(sample, itemsize)
    if usual is not None:
        for chunks, apply_chunks, apply_pieces in ((2, 2, 2), (4, 2, 4), (4, 4, 1), (4, 4, 2), (2, 2, 1)):
            yield replace(usual, chunks=chunks, apply_chunks=apply_chunks, apply_fragments=apply_pieces)
        yield replace(usual, splits=max(1, usual.splits // 2))
        yield replace(usual, num_warps=2 * usual.num_warps)
