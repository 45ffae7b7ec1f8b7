"""Launch configurations of GroupNorm, and how one is chosen.

A choice depends on what one sample looks like and on the width of an element, never on the number of
samples: a sample's bits are the same whatever came with it.  Everything that becomes a constexpr is a power
of two below a fixed bound (tiles, warps, vector width); lengths stay run-time arguments, so endless distinct
shapes share a bounded set of compiled kernels.

Three classes, by the bytes that one program must see twice:

- tile: whole groups in registers, read once;
- sweep (contiguous) and slab (channels-last): one program a group or a slab of groups, whose second sweep
  finds its data in L1 or L2.  On an H200 that holds up to about 256 KB a program, 132 to 264 of which fill
  the L2;
- split and columns: a kernel for partial sums, a small one to fold them, and one that applies them; three
  units of traffic.

Tiles keep 16 to 32 elements a thread: 16 KB or more in flight a program and two programs a multiprocessor,
which is what covers the latency of device memory.  `max_registers` caps what the compiler takes for a thread
where two programs of 16 warps would miss fitting a multiprocessor by a few.
"""

from dataclasses import dataclass
from functools import lru_cache

from triton import next_power_of_2

MAX_PROGRAM_BYTES = 256 * 1024
"""Bytes of x above which a group or slab is split over programs."""

MIN_RUN_BYTES = 64
"""Bytes of neighbouring channels that a channels-last program reads at each position, where groups allow."""

MAX_PARTS = 65536
"""Partial results of one sample that are aimed at, so that folding them stays a small part of the work."""


WIDE_GROUP = 2**31
"""Elements from which offsets inside one contiguous group are 64-bit."""


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


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """`rows` whole groups a program, padded to `channels` x `positions` elements, in registers."""

    rows: int
    channels: int
    positions: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class BackwardSweep:
    """One group a program, swept twice in tiles of `runs` runs of a channel by `units` vectors."""

    runs: int
    units: int
    run_units: int
    num_warps: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """`runs` runs of `run_units` vectors a program, in one kernel for sums and one for dx."""

    runs: int
    units: int
    run_units: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class BackwardSlab:
    """`slab_groups` groups a program in `width` columns, swept twice in tiles of `rows` positions."""

    slab_groups: int
    width: int
    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class BackwardColumns:
    """Blocks of `width` columns over `split_rows` positions, in one kernel for sums and one for dx."""

    width: int
    rows: int
    split_rows: int
    num_warps: int


Backward = BackwardTile | BackwardSweep | BackwardSplit | BackwardSlab | BackwardColumns

FOLD_BLOCK, FOLD_NUM_WARPS = 512, 4
"""Elements of a tile, and warps, of the kernels that fold partial results of one group."""

FOLD_ROWS, FOLD_COLUMNS, FOLD_ROWS_NUM_WARPS = 64, 16, 8
"""Tile and warps of the kernel that folds dweight and dbias; narrow, so that few channels fill the device."""

FOLD_TWICE_ABOVE, FOLD_RUNS = 2048, 64
"""Partial rows above which dweight and dbias are folded in two steps, the first into FOLD_RUNS rows."""


def vector_width(itemsize: int, *sizes: int) -> int:
    """Elements of one access: 16 bytes of x, or the largest power of two below that divides every size."""
    vec = 16 // itemsize
    while any(size % vec for size in sizes):
        vec //= 2
    return vec


@lru_cache(maxsize=4096)
def choose_backward(sample: Sample, itemsize: int) -> Backward:
    """The backward configuration for samples of elements of `itemsize` bytes."""
    if sample.channels_last:
        return _slab_backward(sample, itemsize) or _columns_backward(sample, itemsize)
    channels, positions = next_power_of_2(sample.channels), next_power_of_2(sample.hw)
    padded = channels * positions
    if padded <= 8192 and (padded <= 1024 or padded < 2 * sample.group_length):
        rows = min(64, max(1, 1024 // padded))
        return BackwardTile(rows, channels, positions, _warps(rows * padded, 16))
    vec = vector_width(itemsize, sample.hw)
    channel_units = sample.hw // vec
    units = min(32, next_power_of_2(channel_units))
    # dy and x together: half of what forward may keep.
    if sample.group_length * itemsize <= MAX_PROGRAM_BYTES // 2:
        runs = 1024 // units
        return BackwardSweep(runs, units, _even_run(sample.channels, channel_units, runs, units), 16, 64)
    runs = 256 // units
    run_units = units * max(8, -(-channel_units // (units * _max_splits(sample.c))))
    return BackwardSplit(runs, units, run_units, 4)


def _max_splits(columns: int) -> int:
    """Parts to cut each of a sample's columns into, at most."""
    return min(512, max(32, MAX_PARTS // columns))


def _sweep_units(vec: int) -> int:
    """Vectors of a tile of 16 warps: 16 elements a thread, or 8 where each is an access of its own."""
    return 8192 // vec if vec > 1 else 4096


def _warps(elements: int, a_thread: int) -> int:
    return min(16, max(1, int(next_power_of_2(elements // (32 * a_thread)))))


def _even_run(channels: int, channel_units: int, runs: int, units: int) -> int:
    """The longest run of a channel, in vectors, with which tiles of `runs` runs are least padded."""

    def padded_work(run: int) -> int:
        splits = -(-channel_units // run)
        return -(-channels * splits // runs) * -(-run // units)

    candidates = [units * steps for steps in range(-(-channel_units // units), 0, -1)]
    return min(candidates, key=padded_work)


def _slab_groups(sample: Sample, itemsize: int) -> int | None:
    """Groups of a channels-last slab, or None where one would hold too many columns or bytes."""
    whole = vector_width(itemsize, sample.c)
    for groups in range(1, sample.groups + 1):
        columns = groups * sample.channels
        if columns > 128 or columns * sample.hw * itemsize > MAX_PROGRAM_BYTES:
            return None
        if groups == sample.groups or (columns % whole == 0 and columns * itemsize >= MIN_RUN_BYTES):
            return groups
    return None


def _slab_warps(hw: int, width: int) -> int:
    """16 where there is much to read; at least what holds the width x width comparison of groups."""
    return max(_warps(hw * width, 64), min(16, width * width // 1024))


def _slab_backward(sample: Sample, itemsize: int) -> BackwardSlab | None:
    groups = _slab_groups(sample, itemsize)
    if groups is None:
        return None
    columns = groups * sample.channels
    vec = vector_width(itemsize, sample.c, columns)
    width = max(vec, next_power_of_2(columns))
    num_warps = _slab_warps(sample.hw, width)
    return BackwardSlab(groups, width, max(1, 32 * num_warps * vec // width), num_warps)


def _column_width(sample: Sample, itemsize: int, vec: int) -> int:
    """Columns of a block: the power of two from 32 to 256 bytes that pads C least, the widest of equals.

    Fewer channels than 32 bytes get a block of their own size.
    """
    widths = [max(vec, size // itemsize) for size in (256, 128, 64, 32)]
    if sample.c * itemsize < 32:
        widths = [int(next_power_of_2(sample.c))]
    return min(widths, key=lambda width: (-(-sample.c // width) * width, -width))


def _columns_backward(sample: Sample, itemsize: int) -> BackwardColumns:
    vec = vector_width(itemsize, sample.c)
    width = _column_width(sample, itemsize, vec)
    rows = max(1, 32 * 8 * vec // width)
    split_rows = rows * max(8, -(-sample.hw // (rows * _max_splits(sample.c))))
    return BackwardColumns(width, rows, split_rows, 8)
