"""Launch configurations that may suit a GroupNorm forward pass; `benchmarks.tune.group_norm` times them.

Some 20 for a large sample, the most promising of each algorithm: those whose programs fill the device in whole
waves, and whose registers and L1 hold enough data to hide the latency of memory.  Limits on registers are estimates
of the compiler's results.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from typing import TypeVar

from fusednorm.launch.launches import compute_max_registers
from fusednorm.ops.group_norm.call import GroupNormForwardConfig
from fusednorm.ops.group_norm.channels_last.block_fragments import make_block_tile
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.channels_last.stream_partitions import STREAM_WARPS
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.forward_choice import (
    choose_forward,
    find_stream_forward,
    find_two_pass_forward,
    list_block_groups,
)
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width
from triton import next_power_of_2

Timed = TypeVar("Timed", GroupNormForwardCooperative, ForwardResidentBlock, ForwardCooperativeBlock)

_MULTIPROCESSORS = 132
"""Number on an H200: programs that share a group must all be resident."""

_RESIDENT_BYTES = 128 << 10
"""Groups up to this size are held by one program."""

_COOPERATIVE_BYTES = 16 << 10
"""Smaller groups are not shared by programs."""

_REDUCE_REGISTERS = 40
"""Registers of a thread to reduce columns to groups; 5 more for each separate run of columns."""

_COOPERATIVE_BY_LAG = {0: 6, 1: 2, 2: 4, 3: 2}
"""Number of configurations that share groups, by lag; twice as many of lag 0 if lags do not pay."""

_WORTH_LAGS = 256 << 10
"""Bytes of the smallest groups whose slabs are read again some groups later."""


def iterate_candidates(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormForwardConfig]:
    """Configurations for `samples` samples of elements of `itemsize` bytes, each once; the table's choice first."""
    yield from dict.fromkeys(_iterate_all(sample, itemsize, samples))


def _iterate_all(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormForwardConfig]:
    yield choose_forward(sample, itemsize, _MULTIPROCESSORS)
    yield find_two_pass_forward(sample, itemsize)
    if sample.channels_last:
        yield from iterate_resident_blocks(sample, itemsize, samples)
        yield from iterate_cooperative_blocks(sample, itemsize, samples)
        yield from iterate_streams(sample, itemsize)
    else:
        yield from iterate_resident(sample, itemsize, samples)
        yield from iterate_cooperative(sample, itemsize, samples)


def iterate_resident(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormForwardResident]:
    """Groups in the registers of one program, with numbers of prefetched groups and of writing programs."""
    if sample.group_length * itemsize > _RESIDENT_BYTES:
        return
    units = samples * sample.groups
    for warps in (4, 8, 16, 32):
        chunks = ceil(sample.group_length / (256 * warps))
        fitting = [
            p for p in range(1, 9) if _can_fit_registers(GroupNormForwardResident(warps, p), chunks * 2 * itemsize)
        ]
        for programs_per_sm in fitting[-2:]:
            for ahead in (0, 1) if units > _MULTIPROCESSORS * programs_per_sm else (0,):
                yield GroupNormForwardResident(warps, programs_per_sm, 1, ahead)
        for writers in (2, 4):
            if fitting and writers * units <= _MULTIPROCESSORS:
                yield GroupNormForwardResident(warps, fitting[0], writers, 0)


def iterate_cooperative(sample: SampleShape, itemsize: int, samples: int) -> Iterator[GroupNormForwardCooperative]:
    """Slabs in registers, or read again some groups later."""
    nbytes = sample.group_length * itemsize
    if nbytes <= _COOPERATIVE_BYTES:
        return
    for lag, count in _iterate_lags(nbytes):
        found: dict[GroupNormForwardCooperative, float] = {}
        for chunks, warps, programs_per_sm in product((2, 3, 4, 5, 6, 8, 10, 12, 16), (4, 8, 16), range(1, 7)):
            config = GroupNormForwardCooperative(max(1, chunks * 2 // itemsize), warps, programs_per_sm, lag, 1)
            held = config.chunks * 2 * itemsize
            if _can_fit_registers(config, held * (1 if lag == 0 else 2)):
                members = config.count_members(sample)
                padding = members * config.chunks * config.chunk_elements / sample.group_length
                found[config] = padding * _estimate_cost(
                    members, samples * sample.groups, programs_per_sm, held * 128 * warps * programs_per_sm, lag
                )
        yield from _select_best(found, count)


def iterate_resident_blocks(sample: SampleShape, itemsize: int, samples: int) -> Iterator[ForwardResidentBlock]:
    """Blocks of columns in the registers of one program."""
    found: dict[ForwardResidentBlock, float] = {}
    for groups, warps, programs_per_sm in product(list_block_groups(sample, itemsize)[:3], (4, 8, 16), range(1, 7)):
        tile = make_block_tile(sample, groups, warps, itemsize)
        chunks = ceil(sample.hw / tile.positions)
        units = samples * ceil(sample.groups / groups)
        config = ForwardResidentBlock(groups, warps, programs_per_sm, 4 if 4 * units <= _MULTIPROCESSORS else 1)
        if chunks <= 20 and _can_fit_registers(
            config, chunks * 4, sums=_REDUCE_REGISTERS + 5 * tile.sums_per_thread
        ):
            turns = units / (_MULTIPROCESSORS * programs_per_sm)
            found[config] = (
                _estimate_width_cost(sample, groups, tile.threads_per_position * tile.vec, itemsize)
                * ceil(turns)
                / turns
            )
    yield from _select_best(found, 8)


def iterate_cooperative_blocks(
    sample: SampleShape, itemsize: int, samples: int
) -> Iterator[ForwardCooperativeBlock]:
    """Pieces with equal numbers of positions for each program, in registers or read again some blocks later."""
    for lag, count in _iterate_lags(sample.group_length * itemsize):
        found: dict[ForwardCooperativeBlock, float] = {}
        for groups, warps, programs_per_sm, most in product(
            list_block_groups(sample, itemsize)[:4], (4, 8, 16), range(1, 5), (4, 6, 8, 12, 16)
        ):
            tile = make_block_tile(sample, groups, warps, itemsize)
            members = ceil(sample.hw / (most * tile.positions))
            config = ForwardCooperativeBlock(
                groups, ceil(sample.hw / (members * tile.positions)), warps, programs_per_sm, lag, 1
            )
            members = config.count_members(sample, itemsize)
            # Values that a thread collects of all members and groups at once.
            pairs = next_power_of_2(members) * next_power_of_2(groups) // (32 * warps)
            sums = _REDUCE_REGISTERS + 5 * tile.sums_per_thread + 3 * pairs
            if _can_fit_registers(config, config.chunks * (4 if lag == 0 else 8), sums):
                padding = members * config.chunks * tile.positions / sample.hw
                found[config] = (
                    padding
                    * _estimate_width_cost(sample, groups, tile.threads_per_position * tile.vec, itemsize)
                    * _estimate_cost(
                        members,
                        samples * ceil(sample.groups / groups),
                        programs_per_sm,
                        config.chunks * 512 * warps * programs_per_sm,
                        lag,
                    )
                )
        yield from _select_best(found, count)


def iterate_streams(sample: SampleShape, itemsize: int) -> Iterator[ForwardSampleStream]:
    """Two sweeps over all columns of a position."""
    usual = find_stream_forward(sample, itemsize)
    if usual is None:
        return
    units = sample.c // compute_access_width(itemsize, sample.c)
    fitting = [warps for warps in STREAM_WARPS if 32 * warps >= units and 32 * warps % units <= 8 * warps]
    for warps, (chunks, apply_chunks) in product(fitting[:2], ((2, 2), (4, 2), (4, 4), (8, 4))):
        yield replace(usual, num_warps=warps, chunks=chunks, apply_chunks=apply_chunks)
    for splits in (usual.splits // 2, 2 * usual.splits):
        yield replace(usual, splits=max(1, splits))


def _iterate_lags(group_bytes: int) -> Iterable[tuple[int, int]]:
    if group_bytes < _WORTH_LAGS:
        return ((0, 2 * _COOPERATIVE_BY_LAG[0]),)
    return _COOPERATIVE_BY_LAG.items()


def _estimate_cost(members: int, units: int, programs_per_sm: int, sm_bytes: int, lag: int) -> float:
    """Relative time of a shared pass, by idle programs (without a group, or in the last wave) and by waits."""
    programs = _MULTIPROCESSORS * programs_per_sm
    if not 1 < members <= programs:
        return float("inf")
    teams = min(units, programs // members)
    turns = ceil(units / teams)
    busy = units * members / (turns * programs)
    # A multiprocessor holds about 128 KB in registers; data that is read again should stay in L1.
    wanted = 128 << 10 if lag == 0 else 48 << 10
    # Each wave costs an exchange; more programs per multiprocessor hide more of it.
    return (1 + 0.25 * abs(sm_bytes / wanted - 1) + (0.3 if lag == 0 else 0.1) / programs_per_sm) / busy


def _estimate_width_cost(sample: SampleShape, groups: int, lanes: int, itemsize: int) -> float:
    """Lanes of all blocks per column, plus the cost of runs of less than 128 bytes."""
    nbytes = groups * sample.group_channels * itemsize
    return ceil(sample.groups / groups) * lanes / sample.c * (1 + 0.3 * max(0.0, 128 / nbytes - 1))


def _select_best(found: dict[Timed, float], count: int) -> list[Timed]:
    """The `count` of least cost; of those that differ only in the number of resident programs, the best."""
    chosen: dict[Timed, Timed] = {}
    for config in sorted(found, key=lambda config: found[config]):
        if len(chosen) == count or found[config] == float("inf"):
            break
        chosen.setdefault(replace(config, programs_per_sm=1), config)
    return list(chosen.values())


def _can_fit_registers(
    config: GroupNormForwardResident | GroupNormForwardCooperative | ForwardResidentBlock | ForwardCooperativeBlock,
    held: int,
    sums: int = 0,
) -> bool:
    """Whether registers hold a thread's data and some 20 to 90 more, with at least 8 warps per multiprocessor."""
    rest = compute_max_registers(config) - held - sums
    return 20 <= rest <= 90 and 8 <= config.num_warps * config.programs_per_sm <= 32
