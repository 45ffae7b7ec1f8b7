"""Launch configurations of LayerNorm and RMSNorm: one class for each form of a pass."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """Programs over tiles of `rows` rows by `chunks` blocks of `block_n` columns.

    Persistent, `stages` - 1 tiles ahead in shared memory; or one program a tile where `programs_per_sm` is 0.
    """

    rows: int
    chunks: int
    block_n: int
    num_warps: int
    stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One row a program, held as it lies in memory: `chunks` chunks of 8 columns a thread each.

    Registers are kept to what lets `programs_per_sm` of them be resident.  The row that many multiprocessors times
    `ahead_per_sm` on is asked into L2 meanwhile.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    ahead_per_sm: int = 0

    @property
    def block_n(self) -> int:
        """Columns of a chunk."""
        return 256 * self.num_warps


@dataclass(frozen=True, slots=True)
class ForwardSweep:
    """One row a program, swept twice in chunks of `block_n` columns.

    The row that many multiprocessors times `ahead_per_sm` on is asked into L2 meanwhile.
    """

    block_n: int
    num_warps: int
    ahead_per_sm: int = 0


@dataclass(frozen=True, slots=True)
class ForwardShared:
    """Programs that share a row, a slab of `chunks` chunks of 8 columns a thread each, read twice.

    `programs_per_sm` of them are resident; they exchange the row's moments, and a slab is read again `lag` rows
    after its moments went out.  The slab `ahead` rows on is asked into L2 meanwhile.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def block_n(self) -> int:
        """Columns of a chunk."""
        return 256 * self.num_warps


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """A kernel for the moments of parts of rows, then one for slabs of up to `rows` rows.

    A part is as few pieces of `chunks` chunks as MAX_PARTS a row allow, a slab is `slab_chunks` chunks; a chunk is
    8 columns a thread, and either kernel has warps of its own.
    """

    chunks: int
    num_warps: int
    slab_chunks: int
    slab_num_warps: int
    rows: int

    @property
    def block_n(self) -> int:
        """Columns of a chunk of a part."""
        return 256 * self.num_warps


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Persistent programs over tiles of `rows` rows by `chunks` blocks, `stages` - 1 tiles ahead in shared memory.

    `hold_weight` keeps weight in registers across tiles; otherwise each tile loads it again from L1.  The tiles
    `ahead` turns on are asked into L2.
    """

    rows: int
    block_n: int
    num_warps: int
    stages: int
    programs_per_sm: int
    hold_weight: bool
    chunks: int = 1
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class BackwardShared:
    """Programs that share rows, a slab of `block_n` columns each; they exchange the row's sums.

    `programs_per_sm` of them are resident; a slab is read again `lag` rows after its sums went out.
    The slabs `ahead` rows on are asked into L2 meanwhile.
    """

    block_n: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int


@dataclass(frozen=True, slots=True)
class BackwardSlab:
    """A rows kernel for each row's constants, then slabs of `block_n` columns over tiles of `rows` rows."""

    rows_block_n: int
    rows_num_warps: int
    rows: int
    block_n: int
    num_warps: int
    stages: int
    programs_per_sm: int


Forward = ForwardTile | ForwardRow | ForwardSweep | ForwardShared | ForwardParts
Backward = BackwardTile | BackwardShared | BackwardSlab
