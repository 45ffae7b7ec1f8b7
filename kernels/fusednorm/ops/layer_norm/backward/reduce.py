"""The last kernel of a backward pass: it folds what each program summed for dweight and dbias.

It is launched while the kernel before it still runs (programmatic dependent launch, compute capability 9.0), so
that only its own work adds to the time of the pass.
"""

import triton
import triton.language as tl

from fusednorm.jit.early_start import await_previous


@triton.jit
def _fold(partial_ptr, total_ptr, partials, cols, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    lane = tl.arange(0, BLOCK_P)[:, None]
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, partials, BLOCK_P):
        mask = (first + lane < partials) & (col < cols)
        sums += tl.load(partial_ptr + (first + lane).to(tl.int64) * cols + col, mask=mask, other=0.0)
    total = tl.sum(sums, 0, keep_dims=True)
    tl.store(total_ptr + col, total.to(total_ptr.dtype.element_ty), mask=col < cols)


@triton.jit(do_not_specialize=["partials", "cols"])
def fold_partials_kernel(
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
    """Sum [partials, cols] float32 down the partials in fixed order, and cast.

    The second axis of the grid is over the gradients: dweight first, and dbias, as far as they are not None.
    """
    await_previous(EARLY)
    if dweight_ptr is not None and tl.program_id(1) == 0:
        _fold(dweight_partial_ptr, dweight_ptr, partials, cols, BLOCK_P, BLOCK_N)
    if dbias_ptr is not None and tl.program_id(1) == tl.num_programs(1) - 1:
        _fold(dbias_partial_ptr, dbias_ptr, partials, cols, BLOCK_P, BLOCK_N)
