"""Launch configurations of GroupNorm's backward pass.

- tile: small groups whole in the registers of one program, read once;
- shared and blocks: programs that wait for one another share a contiguous group, or channels-last the groups of a
  block of columns; x and dy are read a second time out of L1 or L2;
- split, columns and stream: a kernel for partial sums, a small one that folds them and one that applies them;
  nothing waits, and x and dy come from memory twice.
"""

from dataclasses import dataclass
from math import gcd

from fusednorm.integers import next_power_of_2
from fusednorm.ops.group_norm.sample import Sample

L2_BYTES = 30 << 20
"""Of x and dy under way at once that are still found in L2 when they are read again; an H200 has 60 MB."""

MAX_OFFSET = 2**31
"""Elements that 32-bit offsets count."""


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """`rows` whole groups a program, padded to `channels` x `positions` elements, in registers."""

    rows: int
    channels: int
    positions: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class BackwardShared:
    """Programs that share a contiguous group, parts of `channels` neighbouring channels each.

    A part is `pieces` pieces, a piece `chunks` tiles along its channels, a tile a vector of 16 bytes of x a thread.
    `programs_per_sm` programs are resident; they exchange the group's sums, and a piece is read again `lag` pieces
    after the part's sums went out.  The piece `ahead` pieces on is asked into L2 meanwhile.
    """

    channels: int
    chunks: int
    pieces: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def units(self) -> int:
        """Threads side by side along a channel."""
        return 32 * self.num_warps // self.channels

    def part_positions(self, itemsize: int) -> int:
        """Positions of a part."""
        return self.pieces * self.chunks * self.units * (16 // itemsize)

    def members(self, sample: Sample, itemsize: int) -> int:
        """Programs that share a group."""
        parts = -(-sample.hw // self.part_positions(itemsize))
        return parts * -(-sample.channels // self.channels)

    def padded_length(self, sample: Sample, itemsize: int) -> int:
        """Elements of all members' tiles."""
        return self.members(sample, itemsize) * self.channels * self.part_positions(itemsize)

    def fits(self, sample: Sample, itemsize: int, multiprocessors: int) -> bool:
        """Whether a group's members are resident together, and a piece is still in L2 when it is read again."""
        programs = self.programs_per_sm * multiprocessors
        under_way = 2 * 16 * 32 * self.num_warps * self.chunks * (self.pieces + self.lag) * programs
        return (
            sample.hw * itemsize % 16 == 0
            and self.members(sample, itemsize) <= programs
            and under_way <= L2_BYTES
            and self.channels * sample.hw < MAX_OFFSET
        )


@dataclass(frozen=True, slots=True)
class BackwardBlocks:
    """Programs that share channels-last groups: a block of `columns` columns over a slab of positions each.

    A slab is `pieces` pieces, a piece `chunks` tiles of as many positions as a vector of 16 bytes of x a thread
    makes. Blocks that groups straddle go together.  `programs_per_sm`, `lag` and `ahead` are those of
    `BackwardShared`.
    """

    columns: int
    chunks: int
    pieces: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    def vectors(self, itemsize: int) -> int:
        """Threads side by side along the columns, some of which may have none."""
        return next_power_of_2(self.columns * itemsize // 16)

    def rows(self, itemsize: int) -> int:
        """Positions of a tile."""
        return 32 * self.num_warps // self.vectors(itemsize)

    def slab_rows(self, itemsize: int) -> int:
        """Positions of a slab."""
        return self.pieces * self.chunks * self.rows(itemsize)

    def splits(self, sample: Sample, itemsize: int) -> int:
        """Slabs of a block."""
        return -(-sample.hw // self.slab_rows(itemsize))

    def bundle_blocks(self, sample: Sample) -> int:
        """Blocks that go together: the fewest that hold whole groups."""
        blocks = sample.channels // gcd(self.columns, sample.channels)
        return min(blocks, -(-sample.c // self.columns))

    def members(self, sample: Sample, itemsize: int) -> int:
        """Programs that share a bundle of blocks."""
        return self.splits(sample, itemsize) * self.bundle_blocks(sample)

    def fits(self, sample: Sample, itemsize: int, multiprocessors: int) -> bool:
        """Whether a bundle's members are resident together, and a piece is still in L2 when it is read again."""
        programs = self.programs_per_sm * multiprocessors
        under_way = 2 * 16 * 32 * self.num_warps * self.chunks * (self.pieces + self.lag) * programs
        return (
            sample.c * itemsize % 16 == 0
            and self.members(sample, itemsize) <= programs
            and under_way <= L2_BYTES
            and sample.hw < MAX_OFFSET
        )

    def padded_width(self, sample: Sample, itemsize: int) -> int:
        """Columns of the tiles of all blocks."""
        return -(-sample.c // self.columns) * self.vectors(itemsize) * (16 // itemsize)


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """Parts of contiguous groups as in `BackwardShared`, one a program, in a kernel for sums and one for dx."""

    channels: int
    chunks: int
    pieces: int
    num_warps: int

    def part_positions(self, itemsize: int) -> int:
        """Positions of a part."""
        return self.pieces * self.chunks * (32 * self.num_warps // self.channels) * (16 // itemsize)


@dataclass(frozen=True, slots=True)
class BackwardColumns:
    """Slabs of `columns` columns, a power of two, one a program, in a kernel for sums and one for dx.

    A slab is `pieces` pieces of `chunks` tiles of as many positions as one vector a thread makes.
    """

    columns: int
    chunks: int
    pieces: int
    num_warps: int

    def rows(self, vec: int) -> int:
        """Positions of a tile of vectors of `vec` elements."""
        return 32 * self.num_warps * vec // self.columns


@dataclass(frozen=True, slots=True)
class BackwardStream:
    """Sums over up to `splits` parts of each channels-last sample, all columns of a position side by side.

    `chunks` accesses of a thread a step; dx of `apply_pieces` pieces of `apply_chunks` accesses a program.
    """

    num_warps: int
    chunks: int
    apply_chunks: int
    apply_pieces: int
    splits: int


Backward = BackwardTile | BackwardShared | BackwardBlocks | BackwardSplit | BackwardColumns | BackwardStream


def most_touched(size: int, window: int) -> int:
    """Intervals of `size`, one behind another, that a window at a multiple of its own size touches at most."""
    if window % size == 0:
        return window // size
    return 1 if size % window == 0 else (window - 2) // size + 2
