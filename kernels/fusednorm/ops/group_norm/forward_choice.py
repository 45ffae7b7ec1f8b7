"""Planning of GroupNorm's forward pass: the choice of a configuration from the tables, and its launches.

The choice depends on the shape of a sample, the size of an element and the device, but not on the number of
samples.  Therefore (except for streams that are split into more parts, `make_stream_partition`) the bits of a
sample's result do not depend on the other samples, and a new number of samples causes no compilation.  Constexprs
are tiles, warps, vector widths and numbers of chunks, all bounded; lengths are run-time arguments.

The algorithms without waiting are used if a residual is too large for the registers, if a group is too large for
the device, and for all groups of several programs if `waits` is False.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import next_power_of_2
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm import config_tables as tables
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.channels_last.block_fragments import make_block_tile
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.channels_last.stream_partitions import (
    STREAM_FROM,
    STREAM_POSITIONS,
    count_stream_splits,
    find_measured_stream,
    find_stream_warps,
)
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.sweep import GroupNormForwardSweep
from fusednorm.ops.group_norm.contiguous.forward.tile import GroupNormForwardTile
from fusednorm.ops.group_norm.layout_copies import plan_layout_copies
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width
from fusednorm.ops.group_norm.statistics import count_sweep_vectors, find_split_forward
from fusednorm.policy.cooperative_launches import may_wait

MAX_PROGRAM_BYTES = 256 * 1024
"""Bytes of x above which a group that a program reads twice is split over programs."""

MIN_RUN_BYTES = 64
"""Bytes of adjacent channels that a channels-last program reads at each position, if groups allow it."""

MAX_BLOCK_COLUMNS = 256
"""The most columns of a block; groups that need more to start and end on 16 bytes are read twice."""

MAX_PADDING = 1.1
"""The most padded elements per element for groups that programs share; 1.14 costs more than a second read from L2.

Fractions of a copy's speed with a residual: 0.71 if shared, 0.81 if read twice (32x256x56x56, float32, padding
1.14); 0.82 and 0.81 without padding (8x512x64x64, bfloat16).
"""

_BLOCK_CHUNKS = {1: 12, 2: 12, 4: 6}
"""The most accesses that a thread holds, by the number of runs of its columns; each run has separate sums.

With 8 runs, one for each column, too few accesses would remain: such samples are read twice.
"""


def plan_forward(call: GroupNormForwardCall, config: GroupNormForwardConfig | None = None) -> list[Launch]:
    """Plan all launches of a forward pass.

    The list includes copies of tensors whose memory layout is not x's.  `config` overrides the choice, for
    tests, benchmarks and compile checks.
    """
    call, copies = plan_layout_copies(call)
    sample, size = call.sample, call.x.element_size()
    choices: tuple[GroupNormForwardConfig, ...] = (config,) if config is not None else ()
    if config is None:
        device = call.x.device
        can_wait = device.has_launch_options and may_wait()
        choices = list_candidates(sample, size, count_multiprocessors(device), can_wait)
    fitting = (fits for choice in choices if (fits := choice.reduce_residency(call)) is not None)
    config = next(fitting, None) or find_two_pass_forward(sample, size)
    return copies + config.plan_launches(call)


def choose_forward(
    sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool = True
) -> GroupNormForwardConfig:
    """Choose the forward configuration for a sample's shape and elements of `itemsize` bytes.

    The choice is for a pass without residual, activation and dropout; with them, `plan_forward` may choose
    another for lack of registers.

    Args:
        can_wait: whether programs may wait for one another, which requires a cooperative launch.
    """
    return next(iter(list_candidates(sample, itemsize, multiprocessors, can_wait)), None) or find_two_pass_forward(
        sample, itemsize
    )


@lru_cache(maxsize=4096)
def list_candidates(
    sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool = True
) -> tuple[GroupNormForwardConfig, ...]:
    """List the configurations to try for a forward pass, fastest first.  The tuple may be empty.

    Each candidate reads a sample only once, or was measured for such samples.  A configuration that uses
    fewer registers follows one that uses more, for passes that fuse more.  `can_wait`: whether programs may
    wait for one another.
    """
    tile = None if sample.channels_last else _find_tile(sample, itemsize)
    if tile is not None:
        return (tile,)
    chosen: list[GroupNormForwardConfig] = [
        config
        for place, config in enumerate(_iterate_measured(sample, itemsize))
        if config.can_be_resident(sample, itemsize, multiprocessors, can_wait)
        and (
            place == 0
            or not isinstance(config, GroupNormForwardCooperative)
            or _compute_padding(config, sample) <= MAX_PADDING
        )
    ]
    if sample.channels_last and sample.hw * sample.c * itemsize < STREAM_FROM:
        block = _find_block(sample, itemsize, multiprocessors, can_wait)
        if isinstance(block, ForwardResidentBlock):
            # Data that one program can hold needs no team: 0.79, not 0.50 (2x512x16x16), 0.73, not 0.71
            # (8x512x32x32).
            chosen = [config for config in chosen if not isinstance(config, ForwardCooperativeBlock)]
        if block is not None:
            chosen.append(block)
    return tuple(chosen)


def _compute_padding(config: GroupNormForwardCooperative, sample: SampleShape) -> float:
    """Compute the ratio of the elements of all members' ranges to the elements of a group."""
    return config.count_members(sample) * config.chunks * config.chunk_elements / sample.group_length


@lru_cache(maxsize=4096)
def find_two_pass_forward(sample: SampleShape, itemsize: int) -> GroupNormForwardConfig:
    """Find the configuration that reads each group twice: for its moments, then for y.

    Groups are read twice if they do not fit the registers of one program, or of the programs that may share
    a group.
    """
    if sample.channels_last:
        return find_stream_forward(sample, itemsize) or find_split_forward(sample, itemsize)
    if sample.group_length * itemsize <= MAX_PROGRAM_BYTES:
        return GroupNormForwardSweep(count_sweep_vectors(compute_access_width(itemsize, sample.group_length)), 16)
    return find_split_forward(sample, itemsize)


def _find_tile(sample: SampleShape, itemsize: int) -> GroupNormForwardTile | None:
    """Find the configuration for contiguous groups so small that a program holds complete groups.

    The result is None if a group, padded to a power of two, has more than 4096 elements.
    """
    vec = compute_access_width(itemsize, sample.group_length)
    units = next_power_of_2(sample.group_length // vec)
    if units * vec > 4096:
        return None
    rows = min(64, max(1, 2048 // (units * vec)))
    return GroupNormForwardTile(rows, units, _count_warps(rows * units * vec, 16))


def _iterate_measured(sample: SampleShape, itemsize: int) -> Iterator[GroupNormForwardConfig]:
    """Yield the measured configurations for samples of this shape, in the order of the tables of measurements.

    If several programs share a group, the number of chunks is reduced so that they have equal shares.
    """
    if not sample.channels_last:
        for most, config in tables.FORWARD_CONTIGUOUS[itemsize]:
            if sample.group_length > most:
                continue
            if isinstance(config, GroupNormForwardCooperative):
                members = config.count_members(sample)
                config = replace(
                    config, chunks=-(-sample.aligned_group_length // (members * config.chunk_elements))
                )
            yield config
        return
    if sample.hw * sample.c * itemsize >= STREAM_FROM:
        streamed = find_measured_stream(tables.FORWARD_STREAM[itemsize], sample)
        if streamed is not None:
            yield streamed
    for channels, most, block in tables.FORWARD_CHANNELS_LAST[itemsize]:
        if channels != sample.group_channels or sample.hw > most:
            continue
        if not _can_use_blocks(sample, block.block_groups, itemsize):
            continue
        if isinstance(block, ForwardCooperativeBlock):
            rows = make_block_tile(sample, block.block_groups, block.num_warps, itemsize).positions
            members = block.count_members(sample, itemsize)
            block = replace(block, chunks=-(-sample.hw // (members * rows)))
        yield block


def _can_use_blocks(sample: SampleShape, groups: int, itemsize: int) -> bool:
    """Return whether blocks of `groups` groups start and end on 16 bytes, and 32-bit offsets span a sample."""
    width = compute_access_width(itemsize, sample.c, groups * sample.group_channels)
    return groups <= sample.groups and width * itemsize == 16 and sample.hw < 2**31 // sample.c


def _count_warps(elements: int, a_thread: int) -> int:
    return min(16, max(1, next_power_of_2(elements // (32 * a_thread))))


def list_block_groups(sample: SampleShape, itemsize: int) -> tuple[int, ...]:
    """List how many groups a block of columns may have, starting with the number that wastes the fewest lanes.

    A block's width is a multiple of 16 bytes, unless no number of the sample's groups is; then a block has
    all groups.  Blocks have at least MIN_RUN_BYTES bytes of columns if the sample has enough groups, and at
    most MAX_BLOCK_COLUMNS columns.  The result is empty if every block would be wider.
    """
    aligned_groups = lcm(sample.group_channels, 16 // itemsize) // sample.group_channels
    counts = list(range(aligned_groups, sample.groups + 1, aligned_groups)) or [sample.groups]
    counts = [count for count in counts if count * sample.group_channels <= MAX_BLOCK_COLUMNS]
    wide = [count for count in counts if count * sample.group_channels * itemsize >= MIN_RUN_BYTES] or counts[-1:]

    def compute_padded_columns(count: int) -> tuple[int, int]:
        tile = make_block_tile(sample, count, 1, itemsize)
        return -(-sample.groups // count) * tile.threads_per_position * tile.vec, count

    return tuple(sorted(wide, key=compute_padded_columns))


def _find_block(
    sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool
) -> ForwardResidentBlock | ForwardCooperativeBlock | None:
    """Find the configuration for blocks of columns with the fewest wasted lanes.  The result is None if
    streaming is faster.

    Streaming, which reads each sample twice, is faster if registers do not hold enough.  From
    STREAM_POSITIONS positions on, streaming is also faster if programs would share a block or keep sums of
    several runs in a lane; with fewer positions, if they would do both.  A run is adjacent columns of a lane
    within one group.
    """
    counts = list_block_groups(sample, itemsize)
    if not counts or sample.hw >= 2**31 // sample.c:
        return None
    groups = counts[0]
    sums = make_block_tile(sample, groups, 1, itemsize).sums_per_thread
    most = _BLOCK_CHUNKS.get(sums)
    if most is None or (sums > 1 and sample.hw >= STREAM_POSITIONS):
        return None
    for warps, programs_per_sm in ((4, 4), (8, 2), (16, 1)):
        chunks = -(-sample.hw // make_block_tile(sample, groups, warps, itemsize).positions)
        if chunks <= most:
            return ForwardResidentBlock(groups, warps, programs_per_sm, writers=4)
    rows = make_block_tile(sample, groups, 8, itemsize).positions
    members = -(-sample.hw // (most * rows))
    may_stream = find_stream_warps(sample, itemsize) is not None
    if not can_wait or members > multiprocessors or (may_stream and (sums > 1 or sample.hw >= STREAM_POSITIONS)):
        return None
    chunks = -(-sample.hw // (members * rows))
    return ForwardCooperativeBlock(groups, chunks, 8, programs_per_sm=2, lag=0, ahead=1)


def find_stream_forward(sample: SampleShape, itemsize: int) -> ForwardSampleStream | None:
    """Find the configuration that reads channels-last samples twice: for moments of groups, then for y.

    The result is None if even the largest program has too few lanes to load all columns of a position at
    once.
    """
    num_warps = find_stream_warps(sample, itemsize)
    if num_warps is None:
        return None
    usual = ForwardSampleStream(num_warps, chunks=4, apply_chunks=4, splits=count_stream_splits(sample, itemsize))
    return find_measured_stream(tables.FORWARD_STREAM[itemsize], sample) or usual
