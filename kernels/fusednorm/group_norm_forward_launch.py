"""Launch configurations of GroupNorm's forward pass, and how one is chosen.

A choice depends on what one sample looks like, on the width of an element and on the device, never on the number
of samples: a sample's bits are the same whatever came with it, and their number causes no compile.  Constexprs are
tiles, warps, vector widths and numbers of chunks, all bounded; lengths stay run-time arguments.

From the smallest groups to the largest, contiguous and (channels-last):

- tile: several whole groups a program, in registers;
- held (block): one program holds a group (a block of columns of whole groups) as it lies in memory;
- shared (shared block): programs of a cooperative launch share it and tell one another its moments;
- sweep (slab): one program reads it twice; split (columns): a kernel for partial sums and one that applies them.
  These never wait for other programs.  They are what a residual too large for the registers, or a group too large
  for the device, gets, and everything that would be shared where `waits` is False.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm
from typing import TypeVar

from triton import next_power_of_2

from fusednorm.group_norm_launch import Sample, column_width, max_splits, vector_width
from fusednorm.launch import registers_for

MAX_PROGRAM_BYTES = 256 * 1024
"""Bytes of x above which a group or slab that a program reads twice is split over programs."""

MIN_RUN_BYTES = 64
"""Bytes of neighbouring channels that a channels-last program reads at each position, where groups allow."""


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """`rows` whole groups a program, each padded to `units` vectors, in registers."""

    rows: int
    units: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ForwardHeld:
    """One group a program, held as it lies in memory in chunks of 8 elements a thread.

    Registers are kept to what lets `programs_per_sm` of them be resident.  Launches with fewer programs than half
    the multiprocessors take up to `writers` programs a group.  The group that many multiprocessors times
    `ahead_per_sm` on is asked into L2 meanwhile.
    """

    num_warps: int
    programs_per_sm: int
    writers: int = 1
    ahead_per_sm: int = 0

    @property
    def block(self) -> int:
        """Elements of a chunk."""
        return 256 * self.num_warps


@dataclass(frozen=True, slots=True)
class ForwardRolling:
    """`ForwardHeld` by persistent programs, `programs_per_sm` to a multiprocessor.

    As a chunk of a group is written, that of the program's next group takes its registers.  The group `ahead` turns
    on is asked into L2.
    """

    num_warps: int
    programs_per_sm: int
    ahead: int

    @property
    def block(self) -> int:
        """Elements of a chunk."""
        return 256 * self.num_warps


@dataclass(frozen=True, slots=True)
class ForwardShared:
    """Programs that share a group, a slab of `chunks` chunks of 8 elements a thread each.

    `programs_per_sm` of them are resident.  A slab is read again `lag` groups after its moments went out; with 0
    it stays in registers.  The slab `ahead` groups on is asked into L2 meanwhile.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def block(self) -> int:
        """Elements of a chunk."""
        return 256 * self.num_warps

    def members(self, sample: Sample) -> int:
        """Programs that share a group."""
        return -(-sample.group_length // (self.chunks * self.block))


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
class ForwardBlock:
    """A block of `block_groups` groups of one sample a program, held as it lies in memory.

    Otherwise as `ForwardHeld`: 16 bytes a thread for each chunk of positions.
    """

    block_groups: int
    num_warps: int
    programs_per_sm: int
    writers: int = 1


@dataclass(frozen=True, slots=True)
class ForwardSharedBlock:
    """Programs that share a block of `block_groups` groups of one sample, `chunks` chunks of positions each.

    Otherwise as `ForwardShared`.
    """

    block_groups: int
    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    def members(self, sample: Sample, itemsize: int) -> int:
        """Programs that share a block."""
        rows = block_tile(sample, self.block_groups, self.num_warps, itemsize).rows
        return -(-sample.hw // (self.chunks * rows))


@dataclass(frozen=True, slots=True)
class ForwardPieces:
    """Moments of pieces of `chunks` chunks of 16 bytes a thread, their fold, then y of as large pieces.

    Pieces are of a group, or, channels-last, of a block of `block_groups` groups' columns of a sample.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    block_groups: int = 0


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


Forward = (
    ForwardTile
    | ForwardHeld
    | ForwardRolling
    | ForwardShared
    | ForwardSweep
    | ForwardSplit
    | ForwardBlock
    | ForwardSharedBlock
    | ForwardPieces
    | ForwardSlab
    | ForwardColumns
)


Held = TypeVar("Held", ForwardHeld, ForwardRolling, ForwardShared, ForwardBlock, ForwardSharedBlock, ForwardPieces)


@dataclass(frozen=True, slots=True)
class BlockTile:
    """A chunk of a block of columns: `rows` positions of `vectors` accesses of `vec` elements.

    Each thread's columns are kept apart as `keep` runs, of which none spans groups.
    """

    vec: int
    vectors: int
    rows: int
    keep: int


def block_tile(sample: Sample, block_groups: int, num_warps: int, itemsize: int) -> BlockTile:
    """The chunk in which one access a thread covers a block of `block_groups` groups' columns."""
    columns = block_groups * sample.channels
    vec = vector_width(itemsize, sample.c, columns)
    vectors = next_power_of_2(columns // vec)
    return BlockTile(vec, vectors, max(1, 32 * num_warps // vectors), vec // gcd(vec, sample.channels))


# An entry serves every group up to its number of elements, by bytes of one.
_HELD: dict[int, tuple[tuple[int, ForwardHeld], ...]] = {
    2: (
        (12288, ForwardHeld(8, programs_per_sm=4, writers=2)),
        (24576, ForwardHeld(8, programs_per_sm=3, writers=2)),
        (32768, ForwardHeld(16, programs_per_sm=2, writers=2)),
        (49152, ForwardHeld(8, programs_per_sm=2, writers=2)),
        (65536, ForwardHeld(16, programs_per_sm=1, ahead_per_sm=1)),
    ),
    4: (
        (12288, ForwardHeld(8, programs_per_sm=2, writers=2)),
        (24576, ForwardHeld(16, programs_per_sm=1, writers=2)),
        (32768, ForwardHeld(16, programs_per_sm=1, writers=2, ahead_per_sm=1)),
    ),
}
_SHARED: dict[int, tuple[tuple[int, ForwardShared], ...]] = {
    2: (
        (131072, ForwardShared(4, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),
        (524288, ForwardShared(8, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        (2**22, ForwardShared(8, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        (2**31, ForwardShared(10, num_warps=8, programs_per_sm=2, lag=1, ahead=1)),
    ),
    4: (
        (131072, ForwardShared(2, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),
        (524288, ForwardShared(4, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        (2**31, ForwardShared(4, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
    ),
}

MAX_BLOCK_COLUMNS = 256
"""Columns of a block at most; groups that need more to start and end on 16 bytes are read twice."""

USUAL_REGISTERS = 20
"""Registers of a thread beside what it holds, at the least."""

_BLOCK_CHUNKS = {1: 12, 2: 12, 4: 8}
"""Accesses that a thread holds at most, by the runs in which its columns are kept apart: each has sums of its own.

With 8 runs, one for each column, too few accesses are left: such samples are read twice.
"""


@lru_cache(maxsize=4096)
def choose_forward(sample: Sample, itemsize: int, multiprocessors: int, waits: bool = True) -> Forward:
    """The forward configuration for samples of elements of `itemsize` bytes.

    Args:
        waits: whether programs may wait for one another, which takes a cooperative launch.
    """
    if sample.channels_last:
        return _block_forward(sample, itemsize, multiprocessors, waits)
    length = sample.group_length
    vec = vector_width(itemsize, length)
    units = length // vec
    padded = next_power_of_2(units)
    if padded * vec <= 4096:
        rows = min(64, max(1, 2048 // (padded * vec)))
        return ForwardTile(rows, padded, _warps(rows * padded * vec, 16))
    held = next((held for limit, held in _HELD[itemsize] if length <= limit), None)
    if held is not None:
        return held
    if waits:
        for limit, shared in _SHARED[itemsize]:
            if length <= limit and shared.members(sample) <= multiprocessors * shared.programs_per_sm:
                return shared
    if length * itemsize <= MAX_PROGRAM_BYTES:
        return ForwardSweep(_sweep_units(vec), 16)
    return split_forward(sample, itemsize)


@lru_cache(maxsize=4096)
def never_waiting(sample: Sample, itemsize: int) -> Forward:
    """The configuration of a pass whose registers neither hold nor share its groups: it reads them twice."""
    if sample.channels_last:
        return _slab_forward(sample, itemsize) or split_forward(sample, itemsize)
    if sample.group_length * itemsize <= MAX_PROGRAM_BYTES:
        return ForwardSweep(_sweep_units(vector_width(itemsize, sample.group_length)), 16)
    return split_forward(sample, itemsize)


@lru_cache(maxsize=4096)
def split_forward(sample: Sample, itemsize: int) -> ForwardSplit | ForwardColumns:
    """The forward configuration that splits groups, whatever their size."""
    if sample.channels_last:
        return _columns_forward(sample, itemsize)
    vec = vector_width(itemsize, sample.group_length)
    tile = _sweep_units(vec)
    tiles = -(-sample.group_length // (vec * tile * max_splits(sample.groups)))
    return ForwardSplit(tile, tile * max(2, tiles), 2 * tile, 16)


def with_room(config: Held, held_bytes: int, extra: int, multiprocessors: int, members: int) -> Held | None:
    """`config` with as few resident programs as leave a thread registers for what it holds; None if none do.

    Args:
        held_bytes: what a thread holds.
        extra: registers for what is fused, beyond the usual.
        members: programs that must be resident together.
    """
    for programs_per_sm in range(config.programs_per_sm, 0, -1):
        fewer = replace(config, programs_per_sm=programs_per_sm)
        if members > multiprocessors * programs_per_sm:
            return None
        if held_bytes // 4 + extra + USUAL_REGISTERS <= registers_for(fewer):
            return fewer
    return None


def _sweep_units(vec: int) -> int:
    """Vectors of a tile of 16 warps: 16 elements a thread, or 8 where each is an access of its own."""
    return 8192 // vec if vec > 1 else 4096


def _warps(elements: int, a_thread: int) -> int:
    return min(16, max(1, int(next_power_of_2(elements // (32 * a_thread)))))


def block_groups(sample: Sample, itemsize: int) -> tuple[int, ...]:
    """Numbers of groups whose columns, from 64 bytes on, may make a block; what wastes the fewest lanes first."""
    whole = lcm(sample.channels, 16 // itemsize) // sample.channels
    counts = list(range(whole, sample.groups + 1, whole)) or [sample.groups]
    counts = [count for count in counts if count * sample.channels <= MAX_BLOCK_COLUMNS]
    wide = [count for count in counts if count * sample.channels * itemsize >= MIN_RUN_BYTES] or counts[-1:]

    def padded(count: int) -> tuple[int, int]:
        tile = block_tile(sample, count, 1, itemsize)
        return -(-sample.groups // count) * tile.vectors * tile.vec, count

    return tuple(sorted(wide, key=padded))


def _block_forward(sample: Sample, itemsize: int, multiprocessors: int, waits: bool) -> Forward:
    counts = block_groups(sample, itemsize)
    if not counts or sample.hw >= 2**31 // sample.c:
        return never_waiting(sample, itemsize)
    groups = counts[0]
    most = _BLOCK_CHUNKS.get(block_tile(sample, groups, 1, itemsize).keep)
    if most is None:
        return never_waiting(sample, itemsize)
    for warps, programs_per_sm in ((4, 4), (8, 2), (16, 1)):
        chunks = -(-sample.hw // block_tile(sample, groups, warps, itemsize).rows)
        if chunks <= most:
            return ForwardBlock(groups, warps, programs_per_sm, writers=4)
    if waits:
        rows = block_tile(sample, groups, 8, itemsize).rows
        members = -(-sample.hw // (most * rows))
        chunks = -(-sample.hw // (members * rows))
        shared = ForwardSharedBlock(groups, chunks, 8, programs_per_sm=2, lag=0, ahead=1)
        if members <= multiprocessors:
            return shared
    return never_waiting(sample, itemsize)


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


def _slab_forward(sample: Sample, itemsize: int) -> ForwardSlab | None:
    groups = _slab_groups(sample, itemsize)
    if groups is None:
        return None
    columns = groups * sample.channels
    vec = vector_width(itemsize, sample.c, columns)
    width = max(vec, next_power_of_2(columns))
    # 16 where there is much to read; at least what holds the width x width comparison of groups.
    num_warps = max(_warps(sample.hw * width, 64), min(16, width * width // 1024))
    rows = max(1, 32 * num_warps * vec // width)
    return ForwardSlab(groups, width, rows, 2, num_warps, 64 if num_warps == 16 and width <= 32 else None)


def _columns_forward(sample: Sample, itemsize: int) -> ForwardColumns:
    vec = vector_width(itemsize, sample.c)
    width = column_width(sample, itemsize)
    rows = max(1, 32 * 8 * vec // width)
    step = rows * 4
    split_rows = step * max(2, -(-sample.hw // (step * max_splits(sample.c))))
    return ForwardColumns(width, rows, 4, split_rows, rows * 2, rows * 8, 8)
