"""Launch configurations of LayerNorm and RMSNorm, and how one is chosen.

A choice depends on the row length and the width of an element, never on the number of rows: a row's bits are
the same whatever came with it, and rows never cause a compile.  All row lengths up to a table entry's limit
share its configuration, so the number of compiled kernels is bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch

from fusednorm.device import INTERPRETED
from fusednorm.launch import REGISTERS_PER_SM

MAX_PARTS = 1024
"""Parts of a long row, whose moments one program merges."""

PARTS_PROGRAMS, MAX_PARTS_A_PROGRAM = 2048, 8
"""Programs over parts that are aimed at, a few for each place on the device, and parts that one of them takes."""

SHARED_BYTES_PER_SM = 200 << 10
"""Shared memory for tiles under way; a Hopper multiprocessor has 228 KB, some of it the system's."""


_REGISTERS_BESIDE = 48
"""Of a thread, for all but the row that it holds."""


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
        (2048, ForwardRow(4, num_warps=2, programs_per_sm=8, ahead_per_sm=2)),  # 1.01
        (2560, ForwardRow(5, num_warps=2, programs_per_sm=10, ahead_per_sm=2)),  # 1.00
        (3072, ForwardRow(3, num_warps=4, programs_per_sm=5, ahead_per_sm=2)),  # 1.01
        (3584, ForwardTile(1, 7, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 1.01
        (4096, ForwardRow(4, num_warps=4, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (5120, ForwardRow(5, num_warps=4, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (6144, ForwardRow(6, num_warps=4, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (7168, ForwardRow(7, num_warps=4, programs_per_sm=5, ahead_per_sm=1)),  # 1.00
        (8192, ForwardRow(4, num_warps=8, programs_per_sm=3, ahead_per_sm=2)),  # 1.00
        (10240, ForwardRow(5, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.00
        (12288, ForwardRow(6, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.00
        (14336, ForwardRow(7, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.00
        (16384, ForwardRow(8, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 0.99
        (20480, ForwardRow(5, num_warps=16, programs_per_sm=2, ahead_per_sm=1)),  # 0.99
        (24576, ForwardRow(12, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 0.98
        (32768, ForwardRow(16, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 0.97
        (49152, ForwardRow(6, num_warps=32, programs_per_sm=1, ahead_per_sm=1)),  # 0.94
        (65536, ForwardRow(16, num_warps=16, programs_per_sm=1, ahead_per_sm=1)),  # 0.89
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
        (2048, ForwardRow(2, num_warps=4, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (2560, ForwardRow(3, num_warps=4, programs_per_sm=3, ahead_per_sm=2)),  # 1.00
        (3072, ForwardRow(3, num_warps=4, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (3584, ForwardTile(1, 7, 512, num_warps=2, stages=1, programs_per_sm=0)),  # 0.99
        (4096, ForwardRow(2, num_warps=8, programs_per_sm=4, ahead_per_sm=2)),  # 1.00
        (5120, ForwardRow(3, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.01
        (6144, ForwardRow(3, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 1.00
        (7168, ForwardRow(4, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.00
        (8192, ForwardRow(4, num_warps=8, programs_per_sm=3, ahead_per_sm=1)),  # 1.00
        (10240, ForwardRow(5, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 0.99
        (12288, ForwardRow(3, num_warps=16, programs_per_sm=2, ahead_per_sm=1)),  # 1.00
        (14336, ForwardRow(7, num_warps=8, programs_per_sm=2, ahead_per_sm=1)),  # 0.98
        (16384, ForwardRow(4, num_warps=16, programs_per_sm=2, ahead_per_sm=1)),  # 0.98
        (20480, ForwardRow(5, num_warps=16, programs_per_sm=1, ahead_per_sm=1)),  # 0.96
        (24576, ForwardRow(3, num_warps=32, programs_per_sm=1, ahead_per_sm=1)),  # 0.97
        (32768, ForwardRow(8, num_warps=16, programs_per_sm=1, ahead_per_sm=1)),  # 0.95
        (524288, ForwardShared(2, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),  # 0.86-0.92
        (2**31, ForwardShared(2, num_warps=8, programs_per_sm=2, lag=3, ahead=1)),  # 0.81
    ),
}
# Rows beyond what resident programs share, and a single one from SINGLE_ROW_COLS on: parts like the slabs of the
# last entry above, so that a row has the same bits either way.
_FORWARD_PARTS = {
    2: ForwardParts(4, num_warps=8, slab_chunks=2, slab_num_warps=4, rows=16),  # 0.54-0.60
    4: ForwardParts(2, num_warps=8, slab_chunks=1, slab_num_warps=4, rows=16),  # 0.48-0.61
}
SINGLE_ROW_COLS = 524289
"""Columns from which a row that comes alone is taken in parts."""

# In place of the entry for rows of first to last columns that are no multiple of 16 bytes: narrow accesses, no
# prefetch, so more warps.
_FORWARD_UNALIGNED: dict[int, tuple[tuple[int, int, Forward], ...]] = {
    2: (
        (513, 1024, ForwardRow(4, num_warps=1, programs_per_sm=12)),  # 0.47 (1001)
        (32769, 65536, ForwardShared(4, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),  # 0.36 (50257)
    ),
    4: ((513, 1024, ForwardRow(4, num_warps=1, programs_per_sm=16)),),  # 0.77 (1001)
}

# In place of the entry for rows of first to last columns of float16: the compiler keeps their float32 values from one
# use to the next, which 16 chunks leave no registers for (0.81 and 0.75 with the entries of bfloat16).
_FORWARD_FLOAT16: tuple[tuple[int, int, Forward], ...] = (
    (24577, 32768, ForwardRow(8, num_warps=16, programs_per_sm=1, ahead_per_sm=1)),  # 0.96 (bfloat16)
    (32769, 65536, ForwardShared(4, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),  # 0.87 (bfloat16)
)

_BACKWARD: dict[int, tuple[tuple[int, Backward], ...]] = {
    2: (
        (16, BackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (64, BackwardTile(16, 64, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (128, BackwardTile(16, 128, num_warps=2, stages=4, programs_per_sm=4, hold_weight=True)),
        (256, BackwardTile(2, 256, num_warps=1, stages=3, programs_per_sm=12, hold_weight=True)),  # 0.98
        (512, BackwardTile(2, 512, num_warps=2, stages=4, programs_per_sm=4, hold_weight=True, ahead=6)),  # 0.98
        (768, BackwardTile(4, 1024, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True)),  # 0.99
        (1024, BackwardTile(1, 1024, num_warps=2, stages=3, programs_per_sm=6, hold_weight=True)),  # 0.98
        (2048, BackwardTile(1, 2048, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True, ahead=6)),  # 0.99
        (2560, BackwardTile(1, 512, num_warps=4, stages=4, programs_per_sm=2, hold_weight=True, chunks=5)),  # 0.98
        (3072, BackwardTile(1, 4096, num_warps=4, stages=3, programs_per_sm=2, hold_weight=True, ahead=3)),  # 0.98
        (4096, BackwardTile(1, 4096, num_warps=4, stages=4, programs_per_sm=1, hold_weight=True, ahead=6)),  # 0.98
        (5120, BackwardTile(1, 1024, num_warps=8, stages=3, programs_per_sm=2, hold_weight=True, chunks=5)),  # 0.94
        (7168, BackwardTile(1, 8192, num_warps=8, stages=4, programs_per_sm=1, hold_weight=True)),  # 0.97
        (8192, BackwardTile(1, 8192, num_warps=16, stages=4, programs_per_sm=1, hold_weight=False, ahead=4)),  # .97
        (
            12288,
            BackwardTile(1, 4096, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True, chunks=3),
        ),  # 0.93
        (2**31, BackwardShared(2048, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),  # 0.80-0.86
    ),
    4: (
        (16, BackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (64, BackwardTile(16, 64, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (128, BackwardTile(8, 128, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True)),
        (256, BackwardTile(2, 256, num_warps=2, stages=3, programs_per_sm=6, hold_weight=True)),  # 0.98
        (512, BackwardTile(1, 512, num_warps=2, stages=3, programs_per_sm=6, hold_weight=True)),  # 0.99
        (768, BackwardTile(1, 256, num_warps=2, stages=3, programs_per_sm=4, hold_weight=True, chunks=3)),  # 1.02
        (1024, BackwardTile(2, 1024, num_warps=4, stages=4, programs_per_sm=1, hold_weight=True, ahead=6)),  # 0.99
        (2048, BackwardTile(1, 2048, num_warps=4, stages=4, programs_per_sm=1, hold_weight=True, ahead=6)),  # 1.00
        (
            2560,
            BackwardTile(1, 512, num_warps=4, stages=4, programs_per_sm=1, hold_weight=True, chunks=5, ahead=4),
        ),  # 0.99
        (
            3072,
            BackwardTile(1, 1024, num_warps=4, stages=3, programs_per_sm=1, hold_weight=True, chunks=3, ahead=3),
        ),  # 0.99
        (4096, BackwardTile(1, 4096, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True, ahead=3)),  # 0.98
        (5120, BackwardTile(1, 8192, num_warps=8, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.96
        (
            6144,
            BackwardTile(1, 2048, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True, chunks=3, ahead=3),
        ),  # 0.97
        (
            7168,
            BackwardTile(1, 1024, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True, chunks=7, ahead=3),
        ),  # 0.97
        (8192, BackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, hold_weight=True)),  # 0.94
        (2**31, BackwardShared(2048, num_warps=4, programs_per_sm=3, lag=2, ahead=1)),  # 0.88-0.92
    ),
}

_BACKWARD_UNALIGNED: dict[int, tuple[tuple[int, int, Backward], ...]] = {
    2: (
        (513, 1024, BackwardTile(2, 1024, num_warps=4, stages=3, programs_per_sm=4, hold_weight=True)),
    ),  # 0.62 (1001)
    4: (
        (513, 1024, BackwardTile(1, 1024, num_warps=4, stages=3, programs_per_sm=3, hold_weight=True)),
    ),  # 0.84 (1001)
}

# Where programs cannot wait for one another, or a row is too long for all of them together.
_BACKWARD_SLAB = {
    2: BackwardSlab(4096, 8, rows=1, block_n=2048, num_warps=4, stages=4, programs_per_sm=2),  # 0.56-0.58
    4: BackwardSlab(4096, 8, rows=1, block_n=1024, num_warps=4, stages=4, programs_per_sm=2),  # 0.55-0.59
}

FOLD_ELEMENTS, FOLD_MAX_PARTIALS, FOLD_MIN_COLS = 2048, 1024, 8
"""Of the tile of the kernel that folds partial dweight and dbias: in one access where there are as few partials."""


Config = TypeVar("Config", Forward, Backward)


def _choices(
    cols: int,
    itemsize: int,
    table: dict[int, tuple[tuple[int, Config], ...]],
    unaligned: dict[int, tuple[tuple[int, int, Config], ...]],
) -> Iterator[Config]:
    """The entry for rows of `cols` columns, and those for longer ones."""
    if cols * itemsize % 16:
        yield from (choice for first, last, choice in unaligned[itemsize] if first <= cols <= last)
    yield from (choice for limit, choice in table[itemsize] if cols <= limit)


def choose_forward(
    cols: int, dtype: torch.dtype, multiprocessors: int, residual: bool, heads: bool = False, single: bool = False
) -> Forward:
    """The forward configuration for rows of `cols` elements of a dtype.

    A residual needs more registers; programs that share rows know no heads.  A `single` row may be taken in another
    way than several, for the same bits.
    """
    itemsize = dtype.itemsize
    choices = _choices(cols, itemsize, _FORWARD, _FORWARD_UNALIGNED)
    if dtype == torch.float16:
        choices = chain((choice for first, last, choice in _FORWARD_FLOAT16 if first <= cols <= last), choices)
    choice = next(choices)
    if isinstance(choice, ForwardRow) and residual:
        choice = _with_residual(choice, itemsize) or next(c for c in choices if isinstance(c, ForwardShared))
    if isinstance(choice, ForwardShared):
        if INTERPRETED or heads:
            return _sweep(cols)
        if residual:
            choice = replace(choice, programs_per_sm=12 // choice.num_warps)
        shared = choice.chunks * choice.block_n * choice.programs_per_sm * multiprocessors
        if cols > shared or (single and cols >= SINGLE_ROW_COLS):
            return _FORWARD_PARTS[itemsize]
    return choice


def _with_residual(choice: ForwardRow, itemsize: int) -> ForwardRow | None:
    """`choice` with as many programs as leave registers for a residual, or None if not even one has them."""
    registers = 2 * choice.chunks * 2 * itemsize + _REGISTERS_BESIDE
    programs = REGISTERS_PER_SM // (32 * choice.num_warps * registers)
    if itemsize == 4:
        programs = max(1, programs)  # In float32 the sum takes the row's place.
    return replace(choice, programs_per_sm=min(choice.programs_per_sm, programs)) if programs else None


def choose_statistics(cols: int, dtype: torch.dtype, multiprocessors: int, residual: bool) -> Forward:
    """The configuration for mean and rstd alone."""
    choice = choose_forward(cols, dtype, multiprocessors, residual)
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
    choice = next(_choices(cols, itemsize, _BACKWARD, _BACKWARD_UNALIGNED))
    if isinstance(choice, BackwardShared):
        if not plain:
            choice = replace(choice, programs_per_sm=choice.programs_per_sm - 1)
        if INTERPRETED or cols > choice.block_n * choice.programs_per_sm * multiprocessors:
            return _BACKWARD_SLAB[itemsize]
    return choice


def choose_fold(most_partials: int) -> dict[str, int]:
    """Tile and warps of the fold of at most that many partials: all at once, in columns as narrow as a sector."""
    block_p = min(1 << (most_partials - 1).bit_length(), FOLD_MAX_PARTIALS)
    block_n = max(FOLD_MIN_COLS, FOLD_ELEMENTS // block_p)
    return {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": max(4, block_p * block_n // 512)}
