"""How both GroupNorm passes stream channels-last samples: which, in how many parts, and in what partition."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Protocol, TypeVar

import torch

from fusednorm.devices.device import multiprocessor_count
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.ops.group_norm.sample import Sample, vector_width
from fusednorm.policy.batch_invariance import is_batch_invariant

STREAM_WARPS, STREAM_IDLE = (4, 8, 16), 1 / 8
"""Of programs that stream channels-last samples: the fewest that leave at most that share of lanes no column."""

STREAM_FROM = 3 << 19
"""Bytes of x in a sample from which streaming it twice is faster than what fewer kernels do."""

STREAM_POSITIONS = 1024
"""Positions of a sample from which that holds for smaller ones, too, against what programs share."""

MEASURED_RANGE = 8
"""How many times as many positions as a sample has a measured way to stream one may be for, at most."""

STREAM_BYTES, MAX_STREAM_SPLITS = 32 << 10, 512
"""Of x for each program that takes sums of a streamed sample, and the most of these for one sample."""

STREAM_LEAST_WARPS = 7
"""On a multiprocessor, of the programs that take sums of streamed samples, however few samples there are."""

Config = TypeVar("Config")


class Streaming(Protocol):
    """What configurations of both passes say of their programs; see `ForwardStream`."""

    @property
    def num_warps(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def apply_chunks(self) -> int: ...
    @property
    def splits(self) -> int: ...


def stream_warps(sample: Sample, itemsize: int) -> int | None:
    """Warps whose lanes take all columns of a position or of several, or None where these are too many."""
    units = sample.c // vector_width(itemsize, sample.c)
    fitting = [warps for warps in STREAM_WARPS if 32 * warps >= units]
    if not fitting or sample.hw >= 2**30:
        return None

    def idle(num_warps: int) -> float:
        return 32 * num_warps % units / (32 * num_warps)

    return next((warps for warps in fitting if idle(warps) <= STREAM_IDLE), min(fitting, key=idle))


def stream_splits(sample: Sample, itemsize: int) -> int:
    """Parts of a streamed sample, by its size alone."""
    return max(1, min(MAX_STREAM_SPLITS, sample.hw * sample.c * itemsize // STREAM_BYTES))


def measured_stream(entries: Iterable[tuple[int, int, Config]], sample: Sample) -> Config | None:
    """The first entry of a table for samples of as many columns and up to as many positions, and not far fewer."""
    return next(
        (
            config
            for columns, most, config in entries
            if columns == sample.c and most // MEASURED_RANGE < sample.hw <= most
        ),
        None,
    )


@dataclass(frozen=True, slots=True)
class StreamPartition:
    """How programs of `lanes` lanes divide a streamed sample: `units` vectors of `vec` columns a position.

    Lanes that are too few for one more position are `idle`.

    Attributes:
        positions: of a tile.
        step: positions that a program takes sums of at a time; every `splits`th step is one program's.
        apply_chunks: tiles of a piece that is written.
        is_cut_finer: there are more splits than the configuration says, for so few samples.
    """

    vec: int
    units: int
    lanes: int
    positions: int
    step: int
    splits: int
    apply_chunks: int
    is_cut_finer: bool

    @property
    def idle(self) -> bool:
        return self.lanes % self.units != 0

    def tile(self, num_warps: int) -> dict[str, object]:
        """Constexprs of the kernels that stream a sample, and their warps."""
        return {"VEC": self.vec, "LANES": self.lanes, "num_warps": num_warps}

    def moments(self, sample: Sample) -> dict[str, int]:
        """Constexprs of those that take moments of its groups: tiles of these, and of runs of a group in a tile.

        A lane's columns are kept apart as runs each of which lies in one group.
        """
        keep = self.vec // gcd(self.vec, sample.channels)
        runs = self.positions * sample.channels * keep // self.vec
        # A tile to gather from has more than one element.
        return {"KEEP": keep, "GROUPS": max(2, next_power_of_2(sample.groups)), "RUNS": next_power_of_2(runs)}


def stream_partition(
    sample: Sample, itemsize: int, config: Streaming, samples: int, device: torch.device
) -> StreamPartition:
    """The partition of `samples` samples of elements of `itemsize` bytes.

    Few samples are cut finer until their programs have STREAM_LEAST_WARPS warps on each multiprocessor; no further,
    for parts have to be reduced.  Where bits may not depend on `samples`, there is one.
    """
    if is_batch_invariant():
        samples = 1
    vec = vector_width(itemsize, sample.c)
    units, lanes = sample.c // vec, 32 * config.num_warps
    positions = lanes // units
    steps = cdiv(sample.hw, positions * config.chunks)
    least = cdiv(multiprocessor_count(device) * STREAM_LEAST_WARPS, config.num_warps * samples)
    splits, apply_chunks = config.splits, config.apply_chunks
    while splits < least:
        splits *= 2
    is_cut_finer = splits > config.splits
    splits = min(splits, steps)
    if is_cut_finer:
        # As many steps for each: a program with one more would be waited for.
        splits = cdiv(steps, steps // splits)
    while apply_chunks > 1 and cdiv(sample.hw, positions * apply_chunks) < least:
        apply_chunks //= 2
    return StreamPartition(
        vec, units, lanes, positions, positions * config.chunks, splits, apply_chunks, is_cut_finer
    )
