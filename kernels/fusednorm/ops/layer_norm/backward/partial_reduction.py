"""The last launch of a backward pass: it adds up the partial sums of all programs for dweight and dbias.

Its kernel is launched while the previous kernel still runs (programmatic dependent launch, compute capability 9.0),
so that only its own work adds to the time of the pass.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array, new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import await_previous_launch
from fusednorm.launch.launches import Launch, RowDependence, make_early_options
from fusednorm.results import Backward

TILE_ELEMENTS, MAX_PARTIALS, MIN_COLS = 2048, 1024, 8
"""Limits of the tile that adds up partial gradients; up to MAX_PARTIALS partials are one access."""


@dataclass(frozen=True, slots=True)
class PartialGradients:
    """The memory for each program's partial sums of dweight and dbias in a backward kernel, float32.

    Attributes:
        count: the number of sums for each element of a parameter.
        dweight, dbias: [programs, *x.shape[1:]] each, None if the gradient is not wanted.
    """

    count: int
    dweight: Array | None
    dbias: Array | None

    @classmethod
    def allocate(
        cls,
        x: Array,
        out: Backward[Array],
        heads_have_own_parameters: bool,
        programs: int,
        max_programs: int | None = None,
    ) -> "PartialGradients":
        """Allocate the memory for the partial sums of `programs` programs, per head if x has heads.

        If `max_programs` is set, there is memory for that many programs, so that its size is the same for any
        number of rows.  `heads_have_own_parameters`: whether heads have separate parameters.
        """
        # Each has a multiple of 16 bytes, so that both are aligned for any number of programs.
        room = cdiv(max_programs or programs, 4) * 4
        wanted = (out.dweight is not None) + (out.dbias is not None)
        both = new_workspace(x, wanted, room, *x.shape[1:]).unbind() if wanted else (None,)
        count = programs if x.ndim == 2 or heads_have_own_parameters else programs * x.shape[1]
        return cls(count, None if out.dweight is None else both[0], None if out.dbias is None else both[-1])


def choose_reduction_tile(most_partials: int) -> dict[str, int]:
    """Choose the tile and the number of warps for the kernel that adds up at most `most_partials` partial sums.

    The tile has all partial sums of a column, up to MAX_PARTIALS, and at least as many columns as a sector
    of memory.
    """
    block_p = min(next_power_of_2(most_partials), MAX_PARTIALS)
    block_n = max(MIN_COLS, TILE_ELEMENTS // block_p)
    return {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": max(4, block_p * block_n // 512)}


def plan_partial_reduction(
    partials: PartialGradients,
    out: Backward[Array],
    early: bool,
    most_partials: int,
    row_dependence: RowDependence | None = None,
) -> list[Launch]:
    """Plan the launch that adds up the programs' partial sums to dweight and dbias.

    The list is empty if neither gradient is wanted.

    Args:
        early: whether it may start before the previous kernel ends.
        most_partials: the largest number of partial sums for any number of rows.
        row_dependence: how the number of programs that write partials depends on the number of rows.
    """
    gradients = [gradient for gradient in (out.dweight, out.dbias) if gradient is not None]
    if not gradients:
        return []
    size = gradients[0].numel()
    tile = choose_reduction_tile(most_partials)
    grid = (cdiv(size, tile["BLOCK_N"]), len(gradients))
    arguments = (partials.dweight, partials.dbias, out.dweight, out.dbias, partials.count, size)
    if row_dependence is not None:
        row_dependence = replace(row_dependence, scales_grid=False, rows_index=None, programs_index=4)
    options = tile | make_early_options(early)
    return [Launch(layer_norm_backward_reduce_kernel, grid, arguments, options, row_dependence)]


@triton.jit
def _sum_partials(partial_ptr, total_ptr, partials, cols, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum [partials, cols] over the partials, for this program's block of BLOCK_N columns, and store the sums.

    The sums are computed in float32 and cast to the dtype of `total_ptr`.
    """
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    lane = tl.arange(0, BLOCK_P)[:, None]
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, partials, BLOCK_P):
        mask = (first + lane < partials) & (col < cols)
        sums += tl.load(partial_ptr + (first + lane).to(tl.int64) * cols + col, mask=mask, other=0.0)
    total = tl.sum(sums, 0, keep_dims=True)
    tl.store(total_ptr + col, total.to(total_ptr.dtype.element_ty), mask=col < cols)


@triton.jit(do_not_specialize=["partials", "cols"])
def layer_norm_backward_reduce_kernel(
    dweight_partial_ptr,
    dbias_partial_ptr,
    dweight_ptr,
    dbias_ptr,
    partials,
    cols,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add up partial sums [partials, cols] to dweight and dbias in a fixed order, BLOCK_N columns per program.

    The second axis of the grid counts the gradients that are not None: dweight first, then dbias.
    """
    await_previous_launch(EARLY)
    if dweight_ptr is not None and tl.program_id(1) == 0:
        _sum_partials(dweight_partial_ptr, dweight_ptr, partials, cols, BLOCK_P, BLOCK_N)
    if dbias_ptr is not None and tl.program_id(1) == tl.num_programs(1) - 1:
        _sum_partials(dbias_partial_ptr, dbias_ptr, partials, cols, BLOCK_P, BLOCK_N)
