"""What the launch configurations of both GroupNorm passes rest on: a sample's shape and a few bounds."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

import torch

from fusednorm.batch_invariance import is_batch_invariant
from fusednorm.device import multiprocessor_count
from fusednorm.integers import next_power_of_2

MAX_PARTS = 65536
"""Partial results of one sample that are aimed at, so that folding them stays a small part of the work."""

WIDE_GROUP = 2**31
"""Elements from which offsets inside one contiguous group are 64-bit."""

FOLD_BLOCK, FOLD_NUM_WARPS = 512, 4
"""Elements of a tile, and warps, of the kernels that fold partial results of one group."""

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


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of x: `groups` groups of `channels` channels of `hw` positions, as memory orders them."""

    groups: int
    channels: int
    hw: int
    channels_last: bool

    @property
    def c(self) -> int:
        """Channels of all groups."""
        return self.groups * self.channels

    @property
    def group_length(self) -> int:
        """Elements of one group."""
        return self.channels * self.hw


def vector_width(itemsize: int, *sizes: int) -> int:
    """Elements of one access: 16 bytes of x, or the largest power of two below that divides every size."""
    vec = 16 // itemsize
    while any(size % vec for size in sizes):
        vec //= 2
    return vec


def max_splits(columns: int) -> int:
    """Parts to cut each of a sample's columns into, at most."""
    return min(512, max(32, MAX_PARTS // columns))


def column_width(sample: Sample, itemsize: int) -> int:
    """Columns of a block: the power of two from 32 to 256 bytes that pads C least, the widest of equals.

    Fewer channels than 32 bytes get a block of their own size.
    """
    vec = vector_width(itemsize, sample.c)
    widths = [max(vec, size // itemsize) for size in (256, 128, 64, 32)]
    if sample.c * itemsize < 32:
        widths = [next_power_of_2(sample.c)]
    return min(widths, key=lambda width: (-(-sample.c // width) * width, -width))


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


def filling(splits: int, samples: int, num_warps: int, device: torch.device) -> int:
    """`splits`, doubled until the programs of all samples have STREAM_LEAST_WARPS warps on each multiprocessor.

    Not more than that: parts have to be folded.  Where bits may not depend on `samples`, there is one.
    """
    least = multiprocessor_count(device) * STREAM_LEAST_WARPS
    samples = 1 if is_batch_invariant() else samples
    while samples * splits * num_warps < least:
        splits *= 2
    return splits


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
class StreamWalk:
    """How programs of `lanes` lanes walk a streamed sample: `units` vectors of `vec` columns a position.

    A tile is `positions` positions, a step of a program `step`; every `splits`th step is one program's.  Lanes that
    are too few for one more position are `idle`.
    """

    vec: int
    units: int
    lanes: int
    positions: int
    step: int
    splits: int

    @property
    def idle(self) -> bool:
        return self.lanes % self.units != 0

    def tile(self, num_warps: int) -> dict[str, object]:
        """Constexprs of the kernels that walk a sample, and their warps."""
        return {"VEC": self.vec, "LANES": self.lanes, "num_warps": num_warps}

    def moments(self, sample: Sample) -> dict[str, int]:
        """Constexprs of those that take moments of its groups: tiles of these, and of runs of a group in a tile.

        A lane's columns are kept apart as runs each of which lies in one group.
        """
        keep = self.vec // gcd(self.vec, sample.channels)
        runs = self.positions * sample.channels * keep // self.vec
        # A tile to gather from has more than one element.
        return {"KEEP": keep, "GROUPS": max(2, next_power_of_2(sample.groups)), "RUNS": next_power_of_2(runs)}


def stream_walk(sample: Sample, itemsize: int, num_warps: int, chunks: int, splits: int) -> StreamWalk:
    """The walk of programs of `num_warps` warps in steps of `chunks` tiles, by at most `splits` programs."""
    vec = vector_width(itemsize, sample.c)
    units, lanes = sample.c // vec, 32 * num_warps
    step = lanes // units * chunks
    return StreamWalk(vec, units, lanes, lanes // units, step, min(splits, -(-sample.hw // step)))
