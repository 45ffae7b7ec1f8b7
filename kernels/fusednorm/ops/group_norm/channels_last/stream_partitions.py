"""Streaming of channels-last samples in both GroupNorm passes: choice of samples, number of parts, partition."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Protocol, TypeVar

from fusednorm.devices.device_properties import GpuModel, count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width
from fusednorm.policy.batch_invariance import is_batch_invariant

STREAM_WARPS, STREAM_IDLE = (4, 8, 16), 1 / 8
"""Warps of programs that stream channels-last samples: the first number with at most this share of idle lanes."""

STREAM_FROM = 3 << 19
"""The size of a sample's x in bytes from which streaming it twice is faster than algorithms with fewer kernels."""

STREAM_POSITIONS = 1024
"""The number of positions from which streaming smaller samples is also faster than programs that share blocks."""

MEASURED_RANGE = 8
"""A table entry is used only for samples with more than 1 / MEASURED_RANGE of its positions."""

STREAM_BYTES, MAX_STREAM_SPLITS = 32 << 10, 512
"""Bytes of x per program that computes sums of a streamed sample, and the most such programs for one sample."""

STREAM_LEAST_WARPS = 7
"""The fewest warps per multiprocessor for programs that compute sums of streamed samples, even with few samples."""

Config = TypeVar("Config")


class AnyStreamConfig(Protocol):
    """The fields that `ForwardSampleStream` and `BackwardSampleStream` have in common, as a type for both.

    Attributes:
        num_warps: warps of a program.
        chunks: tiles that a program reads per step, when it computes sums or moments.
        apply_chunks: tiles of a fragment, when a program writes y or dx.
        splits: parts of a sample, each for one program, when it computes sums or moments.
    """

    @property
    def num_warps(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def apply_chunks(self) -> int: ...
    @property
    def splits(self) -> int: ...


def find_stream_warps(sample: SampleShape, itemsize: int) -> int | None:
    """Find the number of warps with which one access per thread covers all channels of one position, or of
    several positions.

    The number leaves few lanes idle.  The result is None if the columns need more warps than the largest
    program has, or if a sample has 2^30 or more positions.
    """
    units = sample.c // compute_access_width(itemsize, sample.c)
    fitting = [warps for warps in STREAM_WARPS if 32 * warps >= units]
    if not fitting or sample.hw >= 2**30:
        return None

    def compute_idle_fraction(num_warps: int) -> float:
        return 32 * num_warps % units / (32 * num_warps)

    return next(
        (warps for warps in fitting if compute_idle_fraction(warps) <= STREAM_IDLE),
        min(fitting, key=compute_idle_fraction),
    )


def count_stream_splits(sample: SampleShape, itemsize: int) -> int:
    """Return the number of parts of a streamed sample; it depends only on the sample's size."""
    return max(1, min(MAX_STREAM_SPLITS, sample.hw * sample.c * itemsize // STREAM_BYTES))


def find_measured_stream(entries: Iterable[tuple[int, int, Config]], sample: SampleShape) -> Config | None:
    """Find the configuration that was measured for samples with as many columns as `sample` and about as many
    positions.

    The sample's positions must be at most an entry's limit, and above the limit / MEASURED_RANGE.  The
    result is None if no entry covers the sample.
    """
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
    """The division of a streamed channels-last sample among programs of `lanes` lanes.

    A position has `position_vectors` vectors of `vec` columns.  Remaining lanes, too few for another
    position, are idle: see `has_idle_lanes`.

    Attributes:
        positions: the number of positions of a tile.
        step_positions: positions that a program adds up at a time; each program has every `splits`th step.
        apply_chunks: tiles of a fragment that is written.
        has_extra_splits: whether there are more splits than in the configuration, because of few samples.
    """

    vec: int
    position_vectors: int
    lanes: int
    positions: int
    step_positions: int
    splits: int
    apply_chunks: int
    has_extra_splits: bool

    @property
    def has_idle_lanes(self) -> bool:
        return self.lanes % self.position_vectors != 0

    def make_tile_options(self, num_warps: int) -> dict[str, object]:
        """Make the constexprs of the kernels that stream a sample, and their number of warps."""
        return {"VEC": self.vec, "LANES": self.lanes, "num_warps": num_warps}

    def make_moment_options(self, sample: SampleShape) -> dict[str, int]:
        """Make the constexprs of the kernel for moments: sums per lane, and padded numbers of groups and of runs.

        A run is adjacent columns of a lane within one group; each has a sum of its own.  RUNS counts those of a
        group in a tile.
        """
        sums = self.vec // gcd(self.vec, sample.group_channels)
        runs = self.positions * sample.group_channels * sums // self.vec
        # A tile for tl.gather needs more than one element.
        return {"SUMS": sums, "GROUPS": max(2, next_power_of_2(sample.groups)), "RUNS": next_power_of_2(runs)}


def make_stream_partition(
    sample: SampleShape, itemsize: int, config: AnyStreamConfig, samples: int, device: GpuModel
) -> StreamPartition:
    """Choose how `samples` samples of elements of `itemsize` bytes are divided among programs.

    Few samples are split into more parts until their programs have STREAM_LEAST_WARPS warps on each
    multiprocessor, and no further, because parts have to be reduced.  If bits may not depend on `samples`,
    the partition is that of one.
    """
    if is_batch_invariant():
        samples = 1
    vec = compute_access_width(itemsize, sample.c)
    units, lanes = sample.c // vec, 32 * config.num_warps
    positions = lanes // units
    steps = cdiv(sample.hw, positions * config.chunks)
    least = cdiv(count_multiprocessors(device) * STREAM_LEAST_WARPS, config.num_warps * samples)
    splits, apply_chunks = config.splits, config.apply_chunks
    while splits < least:
        splits *= 2
    is_cut_finer = splits > config.splits
    splits = min(splits, steps)
    if is_cut_finer:
        # An equal number of steps for each program, so that none waits for a program with one more.
        splits = cdiv(steps, steps // splits)
    while apply_chunks > 1 and cdiv(sample.hw, positions * apply_chunks) < least:
        apply_chunks //= 2
    return StreamPartition(
        vec, units, lanes, positions, positions * config.chunks, splits, apply_chunks, is_cut_finer
    )
