"""Configurations of kernels that hold their rows in registers from the first pass to the last, by row length.

What they hold is float32 whatever x's dtype, so one table serves all.  As in `launch`, a choice never depends on
the number of rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A program for each tile of `rows` rows by `chunks` blocks of `block_n` columns."""

    rows: int
    chunks: int
    block_n: int
    num_warps: int


# 16 to 56 values a thread: with what else a kernel needs about twice as many registers, so that 64 KB and more
# of 16-bit rows are under way on a multiprocessor.  An entry serves every row up to its number of columns.
_HELD = (
    (16, HeldRows(32, 1, 16, num_warps=2)),
    (64, HeldRows(32, 1, 64, num_warps=4)),
    (128, HeldRows(8, 1, 128, num_warps=1)),
    (256, HeldRows(4, 1, 256, num_warps=1)),
    (512, HeldRows(4, 1, 512, num_warps=2)),
    (768, HeldRows(1, 3, 256, num_warps=1)),
    (1024, HeldRows(1, 1, 1024, num_warps=1)),
    (1536, HeldRows(1, 3, 512, num_warps=2)),
    (2048, HeldRows(1, 1, 2048, num_warps=2)),
    (2560, HeldRows(1, 5, 512, num_warps=2)),
    (3072, HeldRows(1, 3, 1024, num_warps=4)),
    (4096, HeldRows(1, 1, 4096, num_warps=4)),
    (5120, HeldRows(1, 5, 1024, num_warps=4)),
    (6144, HeldRows(1, 3, 2048, num_warps=8)),
    (7168, HeldRows(1, 7, 1024, num_warps=4)),
    (8192, HeldRows(1, 1, 8192, num_warps=8)),
    (10240, HeldRows(1, 5, 2048, num_warps=8)),
    (12288, HeldRows(1, 3, 4096, num_warps=16)),
    (14336, HeldRows(1, 7, 2048, num_warps=8)),
    (16384, HeldRows(1, 1, 16384, num_warps=16)),
)


HELD_AHEAD_PER_SM = 2
"""Of tiles of one row: how many turns of the device ahead a row is asked into L2."""


def choose_held(cols: int) -> HeldRows | None:
    """The configuration for rows of `cols` columns, None where they are too long to hold."""
    return next((held for limit, held in _HELD if cols <= limit), None)
