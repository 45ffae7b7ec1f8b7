"""Planning of GroupNorm's backward pass: the choice of a configuration from the tables, and its launches.

The choice depends on the shape of a sample and the size of an element, but not on the number of samples.
Therefore (except for streams that are split into more parts, `stream_partition`) the bits of a sample's result do
not depend on the other samples, and a new number of samples causes no compilation.
"""

from dataclasses import replace
from functools import lru_cache

from fusednorm.devices.device import multiprocessor_count
from fusednorm.integers import next_power_of_2
from fusednorm.launch.launch import Launch
from fusednorm.ops.group_norm import table as tables
from fusednorm.ops.group_norm.call import BackwardCall, BackwardConfig
from fusednorm.ops.group_norm.channels_last.backward.columns import BackwardColumns
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardStream
from fusednorm.ops.group_norm.channels_last.blocks import most_touched
from fusednorm.ops.group_norm.channels_last.stream import (
    STREAM_FROM,
    STREAM_POSITIONS,
    measured_stream,
    stream_splits,
    stream_warps,
)
from fusednorm.ops.group_norm.companions import copy_companions
from fusednorm.ops.group_norm.contiguous.backward.cooperative import BackwardCooperative
from fusednorm.ops.group_norm.contiguous.backward.split import BackwardSplit
from fusednorm.ops.group_norm.contiguous.backward.tile import BackwardTile
from fusednorm.ops.group_norm.sample import (
    MAX_OFFSET,
    Sample,
    column_width,
    empty_statistics,
    max_splits,
    vector_width,
)
from fusednorm.ops.group_norm.statistics import plan_statistics
from fusednorm.policy.waiting import may_wait

MOST_LABELS = 2
"""The most groups that a vector of a shared block touches; each needs registers for its statistics and sums."""

MAX_WASTE = 1.15
"""The most lanes per element that an entry of the tables may use."""


def idle_share(
    config: BackwardCooperative | BackwardCooperativeBlock, sample: Sample, itemsize: int, multiprocessors: int
) -> float:
    """The fraction of the resident programs that is idle with the largest possible number of teams."""
    programs = config.programs_per_sm * multiprocessors
    return programs % config.members(sample, itemsize) / programs


def plan_backward(call: BackwardCall, config: BackwardConfig | None = None) -> list[Launch]:
    """The launches of a backward pass.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call, copies = copy_companions(call)
    x, sample = call.x, call.sample
    if config is None:
        config = choose_backward(sample, x.element_size(), multiprocessor_count(x.device), may_wait())
    if call.mean is not None or not config.takes_statistics:
        return copies + config.launches(call)
    mean, rstd = empty_statistics(x, sample)
    before = plan_statistics(x, sample, call.options.eps, call.residual, mean, rstd)
    return [*copies, *before, *config.launches(replace(call, mean=mean, rstd=rstd))]


@lru_cache(maxsize=4096)
def choose_backward(sample: Sample, itemsize: int, multiprocessors: int, waits: bool = True) -> BackwardConfig:
    """The backward configuration for samples of elements of `itemsize` bytes.

    Args:
        waits: whether programs may wait for one another, which requires a cooperative launch.
    """
    if sample.channels_last:
        measured = measured_blocks(sample, itemsize, multiprocessors) if waits else None
        if measured is not None:
            return measured
        streamed = stream_backward(sample, itemsize)
        is_large = sample.hw >= STREAM_POSITIONS or sample.hw * sample.c * itemsize >= STREAM_FROM
        if streamed is not None and is_large:
            return streamed
        blocks = cooperative_blocks(sample, itemsize, multiprocessors) if waits else None
        return blocks or streamed or split_backward(sample, itemsize)
    channels, positions = next_power_of_2(sample.channels), next_power_of_2(sample.hw)
    padded = channels * positions
    if padded <= 8192 and (padded <= 1024 or padded < 2 * sample.group_length):
        rows = min(64, max(1, 1024 // padded))
        return BackwardTile(rows, channels, positions, min(16, max(1, rows * padded // 512)))
    cooperative = cooperative_backward(sample, itemsize, multiprocessors) if waits else None
    return cooperative or split_backward(sample, itemsize)


def cooperative_backward(sample: Sample, itemsize: int, multiprocessors: int) -> BackwardCooperative | None:
    """The configuration in which programs share a group, or None if it does not fit the device."""
    for channels, most, config in tables.BACKWARD_CONTIGUOUS[itemsize]:
        if (
            (channels == sample.channels and sample.hw <= most)
            and config.fits(sample, itemsize, multiprocessors)
            and config.padded_length(sample, itemsize) <= MAX_WASTE * sample.group_length
        ):
            return config
    fitting = [
        config
        for pieces in (1, 2, 4, 5, 8)
        for chunks in (2, 3, 4, 5)
        for channels in (1, 2, 4, 8, 16)
        if (config := BackwardCooperative(channels, chunks, pieces, 4, 4, 2, 2)).fits(
            sample, itemsize, multiprocessors
        )
    ]
    return min(
        fitting,
        key=lambda config: (
            config.padded_length(sample, itemsize) / (1.0 - idle_share(config, sample, itemsize, multiprocessors))
        ),
        default=None,
    )


def stream_backward(sample: Sample, itemsize: int) -> BackwardStream | None:
    """The configuration that streams samples twice, or None if the lanes cannot cover all columns."""
    num_warps = stream_warps(sample, itemsize)
    if num_warps is None:
        return None
    usual = BackwardStream(
        num_warps, chunks=4, apply_chunks=4, apply_pieces=2, splits=stream_splits(sample, itemsize)
    )
    return measured_stream(tables.BACKWARD_STREAM[itemsize], sample) or usual


def measured_blocks(sample: Sample, itemsize: int, multiprocessors: int) -> BackwardCooperativeBlock | None:
    """The entry of the tables for the sample's class, or None if no entry fits."""
    if sample.c % (16 // itemsize) or most_touched(sample.channels, 16 // itemsize) > MOST_LABELS:
        return None
    for channels, most, config in tables.BACKWARD_CHANNELS_LAST[itemsize]:
        if (
            (channels == sample.channels and sample.hw <= most)
            and config.columns <= sample.c
            and config.fits(sample, itemsize, multiprocessors)
        ):
            return config
    return None


def cooperative_blocks(sample: Sample, itemsize: int, multiprocessors: int) -> BackwardCooperativeBlock | None:
    """The configuration in which programs share blocks of columns, or None if it does not fit the device."""
    vector = 16 // itemsize
    labels = most_touched(sample.channels, vector)
    if sample.c % vector or labels > MOST_LABELS:
        return None
    programs_per_sm = 4 if labels == 1 else 3
    widths = {size // itemsize for size in (64, 128, 256)}
    widths |= {groups * sample.channels for groups in range(1, sample.groups + 1)}
    fitting = [
        config
        for pieces in (1, 2, 4, 8)
        for columns in widths
        if columns % vector == 0 and 64 <= columns * itemsize <= 256
        if (config := BackwardCooperativeBlock(columns, 2, pieces, 4, programs_per_sm, 2, 1)).fits(
            sample, itemsize, multiprocessors
        )
    ]
    return min(
        fitting,
        key=lambda config: (
            config.padded_width(sample, itemsize) / (1.0 - idle_share(config, sample, itemsize, multiprocessors)),
            abs(config.columns * itemsize - 128),
            config.pieces,
        ),
        default=None,
    )


@lru_cache(maxsize=4096)
def split_backward(sample: Sample, itemsize: int) -> BackwardSplit | BackwardColumns:
    """The configuration whose programs wait for nothing, for samples of any size."""
    most = max_splits(sample.c)
    if sample.channels_last:
        vec = vector_width(itemsize, sample.c)
        columns = BackwardColumns(column_width(sample, itemsize), 4, 1, 4)
        return replace(columns, pieces=_pieces(sample.hw, columns.chunks * columns.rows(vec), most))
    shapes = [BackwardSplit(channels, chunks, 1, 4) for chunks in (2, 3, 4) for channels in (1, 2, 4, 8, 16, 32)]
    shape = min(
        (shape for shape in shapes if shape.channels * sample.hw < MAX_OFFSET or shape.channels == 1),
        key=lambda shape: (
            -(-sample.hw // shape.part_positions(itemsize)) * shape.part_positions(itemsize)
            * -(-sample.channels // shape.channels) * shape.channels
        ),
    )  # fmt: skip
    return replace(shape, pieces=_pieces(sample.hw, shape.part_positions(itemsize), most))


def _pieces(positions: int, piece: int, most: int) -> int:
    """Pieces per program: enough for at most `most` parts, and at least 4 unless there are fewer in all."""
    return min(-(-positions // piece), max(4, -(-positions // (piece * most))))
