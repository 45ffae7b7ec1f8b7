"""Planning of GroupNorm's backward pass: the choice of a configuration from the tables, and its launches.

The choice depends on the shape of a sample and the size of an element, but not on the number of samples.  Therefore
(except for streams that are split into more parts, `make_stream_partition`) the bits of a sample's result do not
depend on the other samples, and a new number of samples causes no compilation.
"""

from dataclasses import replace
from functools import lru_cache

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import next_power_of_2
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm import config_tables as tables
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.backward.columns import BackwardColumnSplit
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.backward.sweep import BackwardBlockSweep
from fusednorm.ops.group_norm.channels_last.column_blocks import count_max_overlaps
from fusednorm.ops.group_norm.channels_last.stream_partitions import (
    STREAM_FROM,
    STREAM_POSITIONS,
    count_stream_splits,
    find_measured_stream,
    find_stream_warps,
)
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.contiguous.backward.split import GroupNormBackwardSplit
from fusednorm.ops.group_norm.contiguous.backward.sweep import GroupNormBackwardSweep
from fusednorm.ops.group_norm.contiguous.backward.tile import GroupNormBackwardTile
from fusednorm.ops.group_norm.layout_copies import plan_layout_copies
from fusednorm.ops.group_norm.sample_shape import (
    MAX_OFFSET,
    SampleShape,
    allocate_statistics,
    choose_block_columns,
    compute_access_width,
    compute_max_splits,
)
from fusednorm.ops.group_norm.statistics import plan_statistics
from fusednorm.policy.cooperative_launches import may_wait

MOST_LABELS = 2
"""The most groups that a vector of a shared block touches; each needs registers for its statistics and sums."""

MAX_WASTE = 1.2
"""The most lanes per element that an entry of the tables may use.

At 1.19, for groups of one channel of 24^3 positions, the entry reached 0.89 of a copy's speed, and the
configuration with the fewest lanes 0.80.
"""

SWEPT_GROUP_BYTES = 40 << 10
"""The most bytes of x of a contiguous group that one program reads twice, the second time from L1 or L2.

Fractions of a copy's speed so, and by kernels that read twice from memory: 0.76 and 0.53 with 20 KB
(409x1280x16x16, bfloat16), 0.80 and 0.55 with 40 KB (204x640x32x32), 0.59 and 0.58 with 80 KB (102x320x64x64).
"""

SWEPT_BLOCK_BYTES = 64 << 10
"""The most bytes of x of a block of channels-last columns that one program reads twice.

As above: 0.61 and 0.33 with 40 KB (409x1280x16x16), 0.61 and 0.40 with 64 KB (256x512x32x32), 0.46 (by earlier
forms of the kernel) and 0.53 with 80 KB (204x640x32x32).  Programs that share the blocks and wait: 0.28
(409x1280x16x16).
"""

SWEPT_WIDTHS = (128, 64)
"""Bytes of adjacent channels that such a program reads at each position, at least the first that fits.

Fractions of a copy's speed with 80, 160, 240 and 320 bytes, without pipelined loads: 0.59, 0.62, 0.59 and 0.57
(409x1280x16x16).
"""

MAX_SWEPT_WIDTH = 512
"""The most bytes of adjacent channels that such a program reads at each position; wider ones were not measured."""

PARTIAL_POSITIONS = 64
"""The fewest positions for each part of a streamed sample, so that partial sums are a small part of the traffic.

With 20 parts of 256 positions: 0.33 of a copy's speed, with 4 parts 0.48 (409x1280x16x16, bfloat16, which
`BackwardBlockSweep` computes now).
"""


def compute_idle_program_fraction(
    config: GroupNormBackwardCooperative | BackwardCooperativeBlock,
    sample: SampleShape,
    itemsize: int,
    multiprocessors: int,
) -> float:
    """Compute which fraction of the device's resident programs would have no work.

    Programs work in teams of equal size, which share a group or several groups.  The programs left over
    after the last complete team are idle.
    """
    programs = config.programs_per_sm * multiprocessors
    return programs % config.count_members(sample, itemsize) / programs


def plan_backward(call: GroupNormBackwardCall, config: GroupNormBackwardConfig | None = None) -> list[Launch]:
    """Plan all launches of a backward pass.

    The list includes copies of tensors whose memory layout is not x's, and the computation of mean and rstd
    if the chosen kernels need both and the call has neither.  `config` overrides the choice, for tests,
    benchmarks and compile checks.
    """
    call, copies = plan_layout_copies(call)
    x, sample = call.x, call.sample
    if config is None:
        can_wait = x.device.has_launch_options and may_wait()
        config = choose_backward(sample, x.element_size(), count_multiprocessors(x.device), can_wait)
    if call.mean is not None or not config.needs_statistics:
        return copies + config.plan_launches(call)
    mean, rstd = allocate_statistics(x, sample)
    before = plan_statistics(x, sample, call.options.eps, call.residual, mean, rstd)
    return [*copies, *before, *config.plan_launches(replace(call, mean=mean, rstd=rstd))]


@lru_cache(maxsize=4096)
def choose_backward(
    sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool = True
) -> GroupNormBackwardConfig:
    """Choose the backward configuration for a sample's shape and elements of `itemsize` bytes.

    Args:
        can_wait: whether programs may wait for one another, which requires a cooperative launch.
    """
    if sample.channels_last:
        swept = find_swept_blocks(sample, itemsize)
        if swept is not None:
            return swept
        streamed = find_backward_stream(sample, itemsize)
        is_large = sample.hw >= STREAM_POSITIONS or sample.hw * sample.c * itemsize >= STREAM_FROM
        if streamed is not None and is_large:
            return streamed
        blocks = find_cooperative_blocks(sample, itemsize, multiprocessors) if can_wait else None
        return blocks or streamed or find_split_backward(sample, itemsize)
    channels, positions = next_power_of_2(sample.group_channels), next_power_of_2(sample.hw)
    padded = channels * positions
    if padded <= 8192 and (padded <= 1024 or padded < 2 * sample.group_length):
        rows = min(64, max(1, 1024 // padded))
        return GroupNormBackwardTile(rows, channels, positions, min(16, max(1, rows * padded // 512)))
    cooperative = find_cooperative_backward(sample, itemsize, multiprocessors) if can_wait else None
    return cooperative or find_swept_groups(sample, itemsize) or find_split_backward(sample, itemsize)


def find_swept_groups(sample: SampleShape, itemsize: int) -> GroupNormBackwardSweep | None:
    """Find the configuration in which one program reads a contiguous group twice.

    The result is None if a group is larger than SWEPT_GROUP_BYTES, if a channel is not a multiple of 16 bytes, or
    if too many lanes would have no element.  Only elements of 16 bits were measured.
    """
    if itemsize != 2 or sample.group_length * itemsize > SWEPT_GROUP_BYTES or sample.hw % 8:
        return None
    for channels in (16, 8, 4, 2):
        lanes = 256 // channels
        chunks = -(-sample.hw // (lanes * 8))
        padded = chunks * lanes * 8 * -(-sample.group_channels // channels) * channels
        if chunks <= 4 and padded <= MAX_WASTE * sample.group_length:
            return GroupNormBackwardSweep(channels, chunks, num_warps=8)
    return None


def find_swept_blocks(sample: SampleShape, itemsize: int) -> BackwardBlockSweep | None:
    """Find the configuration in which one program reads a block of channels-last columns twice.

    The result is None if all blocks of whole groups are too narrow, too wide or larger than SWEPT_BLOCK_BYTES, or
    if too many groups share 16 bytes.  Only elements of 16 bits were measured.
    """
    if itemsize != 2 or sample.c % 8 or count_max_overlaps(sample.group_channels, 8) > MOST_LABELS:
        return None
    widths = [groups * sample.group_channels * itemsize for groups in range(1, sample.groups + 1)]
    for least in SWEPT_WIDTHS:
        width = next((width for width in widths if width >= least and width % 16 == 0), None)
        if width is not None and width <= MAX_SWEPT_WIDTH and width * sample.hw <= SWEPT_BLOCK_BYTES:
            # Several tiles for each program: 0.58 with 4 warps and 10 KB (1638x1280x8x8).
            num_warps = 8 if width * sample.hw > 20 << 10 else 4
            return BackwardBlockSweep(width // (sample.group_channels * itemsize), num_warps)
    return None


def find_cooperative_backward(
    sample: SampleShape, itemsize: int, multiprocessors: int
) -> GroupNormBackwardCooperative | None:
    """Find the configuration in which several programs share a contiguous group.

    The result is None if no such configuration can run: a channel is not a multiple of 16 bytes, or a group
    is too large for the programs resident on the device or for L2.
    """
    for channels, most, config in tables.BACKWARD_CONTIGUOUS[itemsize]:
        if (
            (channels == sample.group_channels and sample.hw <= most)
            and config.can_run(sample, itemsize, multiprocessors)
            and config.compute_padded_length(sample, itemsize) <= MAX_WASTE * sample.group_length
        ):
            return config
    fitting = [
        config
        for fragments in (1, 2, 4, 5, 8)
        for chunks in (2, 3, 4, 5)
        for channels in (1, 2, 4, 8, 16)
        if (config := GroupNormBackwardCooperative(channels, chunks, fragments, 4, 4, 2, 2)).can_run(
            sample, itemsize, multiprocessors
        )
    ]
    return min(
        fitting,
        key=lambda config: (
            config.compute_padded_length(sample, itemsize)
            / (1.0 - compute_idle_program_fraction(config, sample, itemsize, multiprocessors))
        ),
        default=None,
    )


def find_backward_stream(sample: SampleShape, itemsize: int) -> BackwardSampleStream | None:
    """Find the configuration of the kernels that read channels-last samples twice: for sums of columns, then for
    dx.

    The result is None if even the largest program has too few lanes to load all columns of a position at
    once.
    """
    num_warps = find_stream_warps(sample, itemsize)
    if num_warps is None:
        return None
    splits = min(count_stream_splits(sample, itemsize), max(1, sample.hw // PARTIAL_POSITIONS))
    usual = BackwardSampleStream(num_warps, chunks=4, apply_chunks=4, apply_fragments=2, splits=splits)
    return find_measured_stream(tables.BACKWARD_STREAM[itemsize], sample) or usual


def find_cooperative_blocks(
    sample: SampleShape, itemsize: int, multiprocessors: int
) -> BackwardCooperativeBlock | None:
    """Find the configuration in which several programs share channels-last groups.  Each of them has a block
    of columns.

    The result is None if no such configuration can run: C is not a multiple of 16 bytes, too many groups
    share 16 bytes, or the device's resident programs or L2 cannot hold the groups.
    """
    vector = 16 // itemsize
    labels = count_max_overlaps(sample.group_channels, vector)
    if sample.c % vector or labels > MOST_LABELS:
        return None
    programs_per_sm = 4 if labels == 1 else 3
    widths = {size // itemsize for size in (64, 128, 256)}
    widths |= {groups * sample.group_channels for groups in range(1, sample.groups + 1)}
    fitting = [
        config
        for fragments in (1, 2, 4, 8)
        for columns in widths
        if columns % vector == 0 and 64 <= columns * itemsize <= 256
        if (config := BackwardCooperativeBlock(columns, 2, fragments, 4, programs_per_sm, 2, 1)).can_run(
            sample, itemsize, multiprocessors
        )
    ]
    return min(
        fitting,
        key=lambda config: (
            config.compute_padded_width(sample, itemsize)
            / (1.0 - compute_idle_program_fraction(config, sample, itemsize, multiprocessors)),
            abs(config.columns * itemsize - 128),
            config.fragments,
        ),
        default=None,
    )


@lru_cache(maxsize=4096)
def find_split_backward(sample: SampleShape, itemsize: int) -> GroupNormBackwardSplit | BackwardColumnSplit:
    """Find the configuration in which no program waits for another.  There is one for samples of any size."""
    most = compute_max_splits(sample.c)
    if sample.channels_last:
        vec = compute_access_width(itemsize, sample.c)
        columns = BackwardColumnSplit(choose_block_columns(sample, itemsize), 4, 1, 4)
        return replace(
            columns,
            fragments=_count_fragments_per_program(sample.hw, columns.chunks * columns.count_tile_rows(vec), most),
        )
    shapes = [
        GroupNormBackwardSplit(channels, chunks, 1, 4) for chunks in (2, 3, 4) for channels in (1, 2, 4, 8, 16, 32)
    ]
    shape = min(
        (shape for shape in shapes if shape.channels * sample.hw < MAX_OFFSET or shape.channels == 1),
        key=lambda shape: (
            -(-sample.hw // shape.count_range_positions(itemsize)) * shape.count_range_positions(itemsize)
            * -(-sample.group_channels // shape.channels) * shape.channels
        ),
    )  # fmt: skip
    return replace(
        shape, fragments=_count_fragments_per_program(sample.hw, shape.count_range_positions(itemsize), most)
    )


def _count_fragments_per_program(positions: int, fragment_positions: int, max_splits: int) -> int:
    """Return how many fragments each program processes.

    `positions` positions are divided among at most `max_splits` programs; a fragment has `fragment_positions`
    positions.  A program has at least 4 fragments unless fewer exist.
    """
    return min(-(-positions // fragment_positions), max(4, -(-positions // (fragment_positions * max_splits))))
