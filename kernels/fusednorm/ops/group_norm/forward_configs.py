"""Launch configurations of GroupNorm's forward pass.

From the smallest groups to the largest, contiguous and (channels-last):

- tile: several whole groups a program, in registers;
- held (block): one program holds a group (a block of columns of whole groups) as it lies in memory;
- shared (shared block): programs of a cooperative launch share it and tell one another its moments;
- sweep: one program reads it twice; split (columns, stream): a kernel for partial moments, one that
  folds them and one that applies them.  These never wait for other programs.
"""

from dataclasses import dataclass
from math import gcd

from fusednorm.integers import next_power_of_2
from fusednorm.ops.group_norm.sample import Sample, vector_width


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
        return -(-sample.frame_length // (self.chunks * self.block))


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
class ForwardStream:
    """Moments of up to `splits` parts of each sample, `chunks` accesses of a thread a step; their fold; then y of
    pieces of `apply_chunks` accesses."""

    num_warps: int
    chunks: int
    apply_chunks: int
    splits: int


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
    | ForwardShared
    | ForwardSweep
    | ForwardSplit
    | ForwardBlock
    | ForwardSharedBlock
    | ForwardStream
    | ForwardColumns
)


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
