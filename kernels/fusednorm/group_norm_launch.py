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
class ForwardTile:
    """`rows` whole groups a program, each padded to `units` vectors, in registers."""

    rows: int
    units: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ForwardSweep:
    """One group a program, swept twice in tiles of `units` vectors."""

    units: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ForwardSplit:
    """Statistics over parts of `split_units` vectors, then runs of `program_units`; tiles of `units`."""

    units: int
    split_units: int
    program_units: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ForwardSlab:
    """`slab_groups` groups a program in `width` columns; tiles of `rows` positions, `unroll` a step."""

    slab_groups: int
    width: int
    rows: int
    unroll: int
    num_warps: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardColumns:
    """Blocks of `width` columns: statistics over `split_rows` positions in tiles of `rows`, `unroll` a step,
    then runs of `run_rows` in tiles of `apply_rows`."""

    width: int
    rows: int
    unroll: int
    split_rows: int
    apply_rows: int
    run_rows: int
    num_warps: int


Forward = ForwardTile | ForwardSweep | ForwardSplit | ForwardSlab | ForwardColumns

FOLD_BLOCK, FOLD_NUM_WARPS = 512, 4
"""Elements of a tile, and warps, of the kernels that fold partial results of one group."""


def vector_width(itemsize: int, *sizes: int) -> int:
    """Elements of one access: 16 bytes of x, or the largest power of two below that divides every size."""
    vec = 16 // itemsize
    while any(size % vec for size in sizes):
        vec //= 2
    return vec


@lru_cache(maxsize=4096)
def choose_forward(sample: Sample, itemsize: int) -> Forward:
    """The forward configuration for samples of elements of `itemsize` bytes."""
    if sample.channels_last:
        return _slab_forward(sample, itemsize) or _columns_forward(sample, itemsize)
    vec = vector_width(itemsize, sample.group_length)
    units = sample.group_length // vec
    padded = next_power_of_2(units)
    # A tile of 32 KB is 32 elements a thread of 16 warps; much padding would cost more than a second sweep.
    if padded * vec * itemsize <= 32 * 1024 and (units * 8 >= padded * 5 or padded * vec <= 4096):
        rows = min(64, max(1, 2048 // (padded * vec)))
        return ForwardTile(rows, padded, _warps(rows * padded * vec, 32 if padded * vec > 8192 else 16))
    if sample.group_length * itemsize <= MAX_PROGRAM_BYTES:
        return ForwardSweep(_sweep_units(vec), 16)
    return split_forward(sample, itemsize)


@lru_cache(maxsize=4096)
def split_forward(sample: Sample, itemsize: int) -> ForwardSplit | ForwardColumns:
    """The forward configuration that splits groups, whatever their size."""
    if sample.channels_last:
        return _columns_forward(sample, itemsize)
    vec = vector_width(itemsize, sample.group_length)
    tile = _sweep_units(vec)
    tiles = -(-sample.group_length // (vec * tile * _max_splits(sample.groups)))
    return ForwardSplit(tile, tile * max(2, tiles), 2 * tile, 16)


def _max_splits(columns: int) -> int:
    """Parts to cut each of a sample's columns into, at most."""
    return min(512, max(32, MAX_PARTS // columns))


def _sweep_units(vec: int) -> int:
    """Vectors of a tile of 16 warps: 16 elements a thread, or 8 where each is an access of its own."""
    return 8192 // vec if vec > 1 else 4096


def _warps(elements: int, a_thread: int) -> int:
    return min(16, max(1, int(next_power_of_2(elements // (32 * a_thread)))))


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


def _slab_forward(sample: Sample, itemsize: int) -> ForwardSlab | None:
    groups = _slab_groups(sample, itemsize)
    if groups is None:
        return None
    columns = groups * sample.channels
    vec = vector_width(itemsize, sample.c, columns)
    width = max(vec, next_power_of_2(columns))
    num_warps = _slab_warps(sample.hw, width)
    rows = max(1, 32 * num_warps * vec // width)
    return ForwardSlab(groups, width, rows, 2, num_warps, 64 if num_warps == 16 and width <= 32 else None)


def _column_width(sample: Sample, itemsize: int, vec: int) -> int:
    """Columns of a block: the power of two from 32 to 256 bytes that pads C least, the widest of equals.

    Fewer channels than 32 bytes get a block of their own size.
    """
    widths = [max(vec, size // itemsize) for size in (256, 128, 64, 32)]
    if sample.c * itemsize < 32:
        widths = [int(next_power_of_2(sample.c))]
    return min(widths, key=lambda width: (-(-sample.c // width) * width, -width))


def _columns_forward(sample: Sample, itemsize: int) -> ForwardColumns:
    vec = vector_width(itemsize, sample.c)
    width = _column_width(sample, itemsize, vec)
    rows = max(1, 32 * 8 * vec // width)
    step = rows * 4
    split_rows = step * max(2, -(-sample.hw // (step * _max_splits(sample.c))))
    return ForwardColumns(width, rows, 4, split_rows, rows * 2, rows * 8, 8)
