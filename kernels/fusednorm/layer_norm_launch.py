"""Launch configurations of LayerNorm and RMSNorm, and how one is chosen.

A choice depends on the row length and the width of an element, never on the number of rows: a row's bits are
the same whatever came with it, and rows never cause a compile.  All row lengths up to a table entry's limit
share its configuration, so the number of compiled kernels is bounded.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from fusednorm.device import INTERPRETED

SHARED_BYTES_PER_SM = 200 << 10
"""Shared memory for tiles under way; a Hopper multiprocessor has 228 KB, some of it the system's."""


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
class ForwardPieces:
    """Programs that share a row, a slab of as few pieces each as `programs_per_sm` of them leave.

    A piece is `chunks` chunks of 8 columns a thread; the last one stays in registers.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int

    @property
    def block_n(self) -> int:
        """Columns of a chunk."""
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


Forward = ForwardTile | ForwardRow | ForwardSweep | ForwardShared | ForwardPieces
Backward = BackwardTile | BackwardShared | BackwardSlab

# Measured on an H200 by `python -m benchmarks.tune`, x of 256 MiB; the comment is the fraction of a copy reached.
# An entry serves every row up to its number of columns, by bytes of an element of x.
_FORWARD: dict[int, tuple[tuple[int, Forward], ...]] = {
    2: (
        (16, ForwardTile(32, 1, 16, num_warps=2, stages=1, programs_per_sm=0)),
        (64, ForwardTile(32, 1, 64, num_warps=4, stages=1, programs_per_sm=0)),
        (128, ForwardTile(8, 1, 128, num_warps=1, stages=1, programs_per_sm=0)),
        (256, ForwardTile(4, 1, 256, num_warps=1, stages=1, programs_per_sm=0)),  # 1.00
        (512, ForwardTile(2, 1, 512, num_warps=1, stages=1, programs_per_sm=0)),  # 1.00
        (768, ForwardTile(2, 3, 256, num_warps=1, stages=1, programs_per_sm=0)),  # 1.02
        (1024, ForwardTile(1, 1, 1024, num_warps=1, stages=1, programs_per_sm=0)),  # 1.00
        (1536, ForwardTile(1, 3, 512, num_warps=1, stages=1, programs_per_sm=0)),  # 1.02
        (2048, ForwardRow(2, num_warps=4, programs_per_sm=12)),  # 1.00
        (2560, ForwardTile(1, 5, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 0.99
        (3072, ForwardTile(2, 3, 1024, num_warps=4, stages=1, programs_per_sm=0)),  # 0.99
        (3584, ForwardTile(1, 7, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 1.01
        (4096, ForwardRow(2, num_warps=8, programs_per_sm=6)),  # 0.98
        (5120, ForwardRow(5, num_warps=4, programs_per_sm=4)),  # 0.98
        (6144, ForwardRow(6, num_warps=4, programs_per_sm=5)),  # 0.97
        (7168, ForwardRow(7, num_warps=4, programs_per_sm=4)),  # 0.96
        (8192, ForwardSweep(4096, num_warps=8)),  # 0.98-0.99
        (10240, ForwardRow(5, num_warps=8, programs_per_sm=3)),  # 0.97
        (12288, ForwardSweep(4096, num_warps=16, ahead_per_sm=1)),  # 0.97
        (14336, ForwardRow(7, num_warps=8, programs_per_sm=2, ahead_per_sm=2)),  # 0.98
        (16383, ForwardRow(8, num_warps=8, programs_per_sm=2, ahead_per_sm=2)),  # 0.97
        (16384, ForwardSweep(8192, num_warps=16)),  # 0.99
        (20480, ForwardRow(5, num_warps=16, programs_per_sm=2)),  # 0.96
        (24576, ForwardTile(1, 3, 8192, num_warps=16, stages=4, programs_per_sm=1)),  # 0.89
        (32768, ForwardSweep(16384, num_warps=16)),  # 0.93
        (524288, ForwardShared(4, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),  # 0.82-0.87
        (2**31, ForwardShared(4, num_warps=8, programs_per_sm=2, lag=3, ahead=1)),  # 0.74
    ),
    4: (
        (16, ForwardTile(32, 1, 16, num_warps=2, stages=1, programs_per_sm=0)),
        (64, ForwardTile(16, 1, 64, num_warps=2, stages=1, programs_per_sm=0)),
        (128, ForwardTile(4, 1, 128, num_warps=1, stages=1, programs_per_sm=0)),
        (256, ForwardTile(2, 1, 256, num_warps=2, stages=1, programs_per_sm=0)),  # 1.01
        (512, ForwardTile(1, 1, 512, num_warps=1, stages=1, programs_per_sm=0)),  # 1.00
        (768, ForwardTile(1, 3, 256, num_warps=1, stages=1, programs_per_sm=0)),  # 1.02
        (1024, ForwardTile(1, 1, 1024, num_warps=2, stages=1, programs_per_sm=0)),  # 1.00
        (1536, ForwardTile(1, 3, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 1.00
        (2048, ForwardSweep(1024, num_warps=4)),  # 1.00
        (2560, ForwardTile(1, 5, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 0.99
        (3072, ForwardTile(1, 3, 1024, num_warps=4, stages=1, programs_per_sm=0)),  # 0.99
        (3584, ForwardTile(1, 7, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 0.99
        (4096, ForwardSweep(2048, num_warps=8)),  # 1.00
        (5120, ForwardTile(1, 5, 1024, num_warps=8, stages=1, programs_per_sm=0)),  # 1.00
        (6144, ForwardTile(1, 3, 2048, num_warps=4, stages=1, programs_per_sm=0)),  # 0.99
        (7168, ForwardTile(1, 7, 1024, num_warps=4, stages=1, programs_per_sm=0)),  # 0.97
        (8192, ForwardSweep(4096, num_warps=16, ahead_per_sm=1)),  # 0.99
        (10240, ForwardRow(5, num_warps=8, programs_per_sm=2)),  # 0.96
        (12288, ForwardRow(3, num_warps=16, programs_per_sm=2)),  # 0.96
        (14336, ForwardRow(7, num_warps=8, programs_per_sm=2)),  # 0.95
        (16384, ForwardRow(4, num_warps=16, programs_per_sm=1, ahead_per_sm=1)),  # 0.95
        (20480, ForwardRow(5, num_warps=16, programs_per_sm=1)),  # 0.95
        (24576, ForwardRow(6, num_warps=16, programs_per_sm=1)),  # 0.95
        (32768, ForwardRow(8, num_warps=16, programs_per_sm=1)),  # 0.95
        (524288, ForwardShared(2, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),  # 0.86-0.92
        (2**31, ForwardShared(2, num_warps=8, programs_per_sm=2, lag=3, ahead=1)),  # 0.81
    ),
}
_FORWARD_PIECES = {
    2: ForwardPieces(8, num_warps=16, programs_per_sm=1),
    4: ForwardPieces(4, num_warps=16, programs_per_sm=1),
}

_BACKWARD: dict[int, tuple[tuple[int, Backward], ...]] = {
    2: (
        (16, BackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (64, BackwardTile(16, 64, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (128, BackwardTile(16, 128, num_warps=2, stages=4, programs_per_sm=4, hold_weight=True)),
        (256, BackwardTile(8, 256, num_warps=2, stages=4, programs_per_sm=4, hold_weight=True)),  # 0.88
        (512, BackwardTile(4, 512, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),  # 0.95
        (768, BackwardTile(4, 1024, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True)),  # 0.99
        (1024, BackwardTile(2, 1024, num_warps=4, stages=4, programs_per_sm=3, hold_weight=True)),  # 0.96
        (2048, BackwardTile(1, 2048, num_warps=4, stages=3, programs_per_sm=4, hold_weight=True)),  # 0.96
        (3072, BackwardTile(1, 4096, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True)),  # 0.94
        (4096, BackwardTile(2, 4096, num_warps=8, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.95
        (7168, BackwardTile(1, 8192, num_warps=8, stages=4, programs_per_sm=1, hold_weight=True)),  # 0.86-0.98
        (8192, BackwardTile(1, 8192, num_warps=16, stages=4, programs_per_sm=1, hold_weight=False)),  # 0.97
        (12288, BackwardShared(2048, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),  # 0.87
        (2**31, BackwardShared(2048, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),  # 0.80-0.86
    ),
    4: (
        (16, BackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (64, BackwardTile(16, 64, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (128, BackwardTile(8, 128, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (256, BackwardTile(2, 256, num_warps=2, stages=4, programs_per_sm=4, hold_weight=True)),  # 0.96
        (512, BackwardTile(2, 512, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True)),  # 0.97
        (768, BackwardTile(1, 1024, num_warps=4, stages=4, programs_per_sm=3, hold_weight=True)),  # 0.99
        (1024, BackwardTile(4, 1024, num_warps=8, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.98
        (2048, BackwardTile(2, 2048, num_warps=4, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.97
        (4096, BackwardTile(1, 4096, num_warps=4, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.97-0.98
        (8192, BackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.93-0.96
        (2**31, BackwardShared(2048, num_warps=4, programs_per_sm=3, lag=2, ahead=1)),  # 0.88-0.92
    ),
}

# Where programs cannot wait for one another, or a row is too long for all of them together.
_BACKWARD_SLAB = {
    2: BackwardSlab(4096, 8, rows=1, block_n=2048, num_warps=4, stages=4, programs_per_sm=2),  # 0.56-0.58
    4: BackwardSlab(4096, 8, rows=1, block_n=1024, num_warps=4, stages=4, programs_per_sm=2),  # 0.55-0.59
}

FOLD_BLOCK_P, FOLD_BLOCK_N, FOLD_NUM_WARPS = 32, 32, 8
"""Tile and warps of the kernel that folds partial dweight and dbias; narrow, so that short rows fill it."""


def choose_forward(cols: int, itemsize: int, multiprocessors: int, residual: bool, heads: bool = False) -> Forward:
    """The forward configuration for rows of `cols` elements of `itemsize` bytes.

    A residual needs more registers; programs that share rows know no heads.
    """
    choice = next(choice for limit, choice in _FORWARD[itemsize] if cols <= limit)
    if isinstance(choice, ForwardRow) and residual and choice.num_warps * choice.programs_per_sm >= 32:
        return replace(choice, programs_per_sm=choice.programs_per_sm - -(-choice.programs_per_sm // 4))
    if isinstance(choice, ForwardShared):
        if INTERPRETED or heads:
            return _sweep(cols)
        if residual:
            choice = replace(choice, programs_per_sm=12 // choice.num_warps)
        if cols > choice.chunks * choice.block_n * choice.programs_per_sm * multiprocessors:
            pieces = _FORWARD_PIECES[itemsize]
            return replace(pieces, chunks=pieces.chunks // 2) if residual else pieces
    return choice


def choose_statistics(cols: int, itemsize: int, multiprocessors: int, residual: bool) -> Forward:
    """The configuration for mean and rstd alone."""
    choice = choose_forward(cols, itemsize, multiprocessors, residual)
    return _sweep(cols) if isinstance(choice, ForwardTile | ForwardRow) else choice


def _sweep(cols: int) -> ForwardSweep:
    block = min(1 << (cols.bit_length() - 2), 8192)
    return ForwardSweep(block, num_warps=max(1, block // 256))


Tile = TypeVar("Tile", ForwardTile, BackwardTile)


def within_shared_memory(config: Tile, column_bytes: int) -> Tile:
    """`config` with as many stages as the tensors of a tile leave room for, `column_bytes` for each column.

    Residuals, and parameters that are not held, go through shared memory with x and dy; the tables foresee the two.
    """
    if config.stages == 1:
        return config
    tile_bytes = config.rows * config.chunks * config.block_n * column_bytes * config.programs_per_sm
    stages = max(1, 1 + SHARED_BYTES_PER_SM // tile_bytes)
    return config if stages >= config.stages else replace(config, stages=stages)


def choose_backward(cols: int, itemsize: int, multiprocessors: int, plain: bool) -> Backward:
    """The backward configuration for rows of `cols` elements of `itemsize` bytes.

    A pass that is not `plain`, with a residual, an activation or dropout, needs more registers.
    """
    choice = next(choice for limit, choice in _BACKWARD[itemsize] if cols <= limit)
    if isinstance(choice, BackwardShared):
        if not plain:
            choice = replace(choice, programs_per_sm=choice.programs_per_sm - 1)
        if INTERPRETED or cols > choice.block_n * choice.programs_per_sm * multiprocessors:
            return _BACKWARD_SLAB[itemsize]
    return choice
