"""How a launch configuration of LayerNorm or RMSNorm is chosen from the tables.

A choice depends on the row length and the width of an element, never on the number of rows: a row's bits are
the same whatever came with it, and rows never cause a compile.  All row lengths up to a table entry's limit
share its configuration, so the number of compiled kernels is bounded.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from fusednorm.launch.launch import REGISTERS_PER_SM
from fusednorm.ops.layer_norm import table as tables
from fusednorm.ops.layer_norm.configs import (
    Backward,
    BackwardShared,
    BackwardTile,
    Forward,
    ForwardRow,
    ForwardShared,
    ForwardSweep,
    ForwardTile,
)
from fusednorm.policy.waiting import may_wait

MAX_PARTS = 1024
"""Parts of a long row, whose moments one program merges."""

PARTS_PROGRAMS, MAX_PARTS_A_PROGRAM = 2048, 8
"""Programs over parts that are aimed at, a few for each place on the device, and the most parts of one of them."""

MOST_BYTES_WITH_RESIDUAL = 96 << 10
"""Of a row that one program holds with a residual: at 128 KB, nothing but the next row's prefetch overlaps."""

SHARED_BYTES_PER_SM = 200 << 10
"""Shared memory for tiles under way; a Hopper multiprocessor has 228 KB, some of it the system's."""

_REGISTERS_BESIDE = 48
"""Of a thread, for all but the row that it holds."""

FOLD_ELEMENTS, FOLD_MAX_PARTIALS, FOLD_MIN_COLS = 2048, 1024, 8
"""Of the tile of the kernel that folds partial dweight and dbias: in one access where there are as few partials."""


Config = TypeVar("Config", Forward, Backward)


def _between(cols: int, table: tuple[tuple[int, int, Config], ...]) -> Iterator[Config]:
    return (choice for first, last, choice in table if first <= cols <= last)


def _choices(
    cols: int,
    itemsize: int,
    table: dict[int, tuple[tuple[int, Config], ...]],
    unaligned: dict[int, tuple[tuple[int, int, Config], ...]],
) -> Iterator[Config]:
    """The entry for rows of `cols` columns, and those for longer ones."""
    if cols * itemsize % 16:
        yield from _between(cols, unaligned[itemsize])
    yield from (choice for limit, choice in table[itemsize] if cols <= limit)


def choose_forward(
    cols: int, itemsize: int, multiprocessors: int, residual: bool, heads: bool = False, single: bool = False
) -> Forward:
    """The forward configuration for rows of `cols` elements of `itemsize` bytes.

    A residual needs more registers; programs that share rows know no heads.  A `single` row may be taken in another
    way than several, for the same bits.
    """
    choices = _choices(cols, itemsize, tables.FORWARD, tables.FORWARD_UNALIGNED)
    if residual:
        choices = chain(_between(cols, tables.FORWARD_WITH_RESIDUAL[itemsize]), choices)
    choice = next(choices)
    if isinstance(choice, ForwardRow) and residual:
        held = _with_residual(choice, itemsize) if cols * itemsize <= MOST_BYTES_WITH_RESIDUAL else None
        choice = held or next(c for c in choices if isinstance(c, ForwardShared))
    if isinstance(choice, ForwardShared):
        if heads or not may_wait():
            return _sweep(cols)
        if residual:
            choice = replace(choice, programs_per_sm=12 // choice.num_warps)
        shared = choice.chunks * choice.block_n * choice.programs_per_sm * multiprocessors
        if cols > shared or (single and cols >= tables.SINGLE_ROW_COLS):
            return tables.FORWARD_PARTS[itemsize]
    return choice


def _with_residual(choice: ForwardRow, itemsize: int) -> ForwardRow | None:
    """`choice` with as many programs as leave registers for a residual, or None if not even one has them.

    With twice the bytes of a row, one row a multiprocessor is far enough ahead: 1.01 of a copy with one, 0.98 with
    two (8192 columns in bfloat16, 4096 in float32).
    """
    registers = 2 * choice.chunks * 2 * itemsize + _REGISTERS_BESIDE
    programs = REGISTERS_PER_SM // (32 * choice.num_warps * registers)
    if itemsize == 4:
        programs = max(1, programs)  # In float32 the sum takes the row's place.
    if not programs:
        return None
    ahead = min(1, choice.ahead_per_sm)
    return replace(choice, programs_per_sm=min(choice.programs_per_sm, programs), ahead_per_sm=ahead)


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
    choice = next(_choices(cols, itemsize, tables.BACKWARD, tables.BACKWARD_UNALIGNED))
    if isinstance(choice, BackwardShared):
        if not plain:
            choice = replace(choice, programs_per_sm=choice.programs_per_sm - 1)
        if not may_wait() or cols > choice.block_n * choice.programs_per_sm * multiprocessors:
            return tables.BACKWARD_SLAB[itemsize]
    return choice


def choose_fold(most_partials: int) -> dict[str, int]:
    """Tile and warps of the fold of at most that many partials: all at once, in columns as narrow as a sector."""
    block_p = min(1 << (most_partials - 1).bit_length(), FOLD_MAX_PARTIALS)
    block_n = max(FOLD_MIN_COLS, FOLD_ELEMENTS // block_p)
    return {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": max(4, block_p * block_n // 512)}


def choose_parts_a_program(parts: int) -> int:
    """How many of all rows' parts one program takes; a row has the same bits for any number."""
    return max(1, min(MAX_PARTS_A_PROGRAM, parts // PARTS_PROGRAMS))
