"""The last launches of a backward pass: they add up the partial sums of all programs for the parameters.

Without scale, shift and gate it is one launch.  With them a first launch adds up the partial sums of each sample,
for dscale, dshift, dgate and the sample's share of dweight and dbias; a second one adds up these shares.

The first kernel is launched while the previous kernel still runs (programmatic dependent launch, compute capability
9.0), so that only its own work adds to the time of the pass.
"""

import math
from dataclasses import dataclass, field, replace

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array, new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import await_previous_launch
from fusednorm.jit.loads import add_weight_offset
from fusednorm.launch.launches import Launch, RowDependence, make_early_options
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.gradient_steps import load_parameter

TILE_ELEMENTS, MAX_PARTIALS, MIN_COLS = 2048, 1024, 8
"""Limits of the tile that adds up partial gradients; up to MAX_PARTIALS partials are one access."""


@dataclass(frozen=True, slots=True)
class PartialGradients:
    """The memory for each program's partial sums of dweight, dbias and dgate in a backward kernel, float32.

    Attributes:
        count: the number of sums for each element of a parameter.
        dweight, dbias, dgate: [programs, *call.partial_shape] each, None if the gradient is not wanted.
        are_results: whether they are the gradients themselves, [cols] in their own dtypes, each of one program.
    """

    count: int
    dweight: Array | None
    dbias: Array | None
    dgate: Array | None = None
    are_results: bool = field(default=False, kw_only=True)

    @classmethod
    def allocate(
        cls, call: LayerNormBackwardCall, programs: int, max_programs: int | None = None
    ) -> "PartialGradients":
        """Allocate the memory for the partial sums of `programs` programs, per head or sample if x has these.

        If `max_programs` is set, there is memory for that many programs, so that its size is the same for any
        number of rows.
        """
        x, out = call.x, call.out
        of_weight = out.dweight is not None or out.dscale is not None
        # dscale is the gradient of a factor of weight * x_hat + bias.
        of_bias = (
            out.dbias is not None or out.dshift is not None or (out.dscale is not None and call.bias is not None)
        )
        own = call.heads_have_own_parameters or call.is_modulated
        shape = call.partial_shape
        count = programs if len(shape) == 1 or own else programs * shape[0]
        wanted = of_weight, of_bias, out.dgate is not None
        return cls(count, *_allocate_sums(x, wanted, max_programs or programs, *shape))

    @classmethod
    def from_results(cls, call: LayerNormBackwardCall) -> "PartialGradients":
        """Take the results in place of partial sums, where each column has one program for any number of rows.

        The programs round their sums to the results' dtype, and nothing is left to add up.
        """
        return cls(1, call.out.dweight, call.out.dbias, are_results=True)


def _allocate_sums(x: Array, wanted: tuple[bool, ...], count: int, *shape: int) -> list[Array | None]:
    """Allocate `count` float32 sums of each wanted gradient; None for another one."""
    # Each has a multiple of 16 bytes, so that all are aligned for any number of programs.
    step = 4 // math.gcd(4, math.prod(shape))
    sums = iter(new_workspace(x, sum(wanted), cdiv(count, step) * step, *shape).unbind() if any(wanted) else ())
    return [next(sums) if each else None for each in wanted]


def choose_reduction_tile(most_partials: int) -> dict[str, int]:
    """Choose the tile and the number of warps for the kernel that adds up at most `most_partials` partial sums.

    The tile has all partial sums of a column, up to MAX_PARTIALS, and at least as many columns as a sector
    of memory.
    """
    block_p = min(next_power_of_2(most_partials), MAX_PARTIALS)
    block_n = max(MIN_COLS, TILE_ELEMENTS // block_p)
    return {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": max(4, block_p * block_n // 512)}


def plan_partial_reduction(
    call: LayerNormBackwardCall,
    partials: PartialGradients,
    most_partials: int,
    row_dependence: RowDependence | None = None,
) -> list[Launch]:
    """Plan the launches that add up the programs' partial sums to the gradients of parameters and of samples.

    The list is empty if no gradient is wanted.

    Args:
        most_partials: the largest number of partial sums for any number of rows.
        row_dependence: how the number of programs that write partials depends on the number of rows.
    """
    out, early = call.out, call.can_start_early
    launches: list[Launch] = []
    if partials.are_results:
        return launches
    if call.is_modulated:
        launches, partials = _plan_sample_reduction(call, partials)
        most_partials, early = partials.count, False
    gradients = [gradient for gradient in (out.dweight, out.dbias) if gradient is not None]
    if not gradients:
        return launches
    size = gradients[0].numel()
    tile = choose_reduction_tile(most_partials)
    grid = (cdiv(size, tile["BLOCK_N"]), len(gradients))
    arguments = (partials.dweight, partials.dbias, out.dweight, out.dbias, partials.count, size)
    if row_dependence is not None:
        row_dependence = replace(row_dependence, scales_grid=False, rows_index=None, programs_index=4)
    options = tile | make_early_options(early)
    return [*launches, Launch(layer_norm_backward_reduce_kernel, grid, arguments, options, row_dependence)]


def _plan_sample_reduction(
    call: LayerNormBackwardCall, partials: PartialGradients
) -> tuple[list[Launch], PartialGradients]:
    """Plan the launch that adds up the programs' partial sums for each sample.

    Returns a list of it, and each sample's share of dweight and dbias as partial sums.  The list is empty if no
    gradient is wanted.
    """
    out, x = call.out, call.x
    samples, cols = x.shape[1:]
    wanted = out.dweight is not None, out.dbias is not None
    of_samples = PartialGradients(samples, *_allocate_sums(x, wanted, samples, cols))
    if partials.dweight is partials.dbias is partials.dgate is None:
        return [], of_samples
    tile = choose_reduction_tile(partials.count)
    *_, stride = call.modulation_arguments(1)
    arguments = (
        partials.dweight, partials.dbias, partials.dgate, call.weight, call.bias, call.scale,
        out.dscale, out.dshift, out.dgate, of_samples.dweight, of_samples.dbias,
        partials.count, samples, cols, stride,
    )  # fmt: skip
    options = {
        "WEIGHT_OFFSET": float(call.options.weight_offset),
        **tile,
        **make_early_options(call.can_reduce_early),
    }
    grid = (cdiv(cols, tile["BLOCK_N"]) * samples,)
    return [Launch(layer_norm_backward_reduce_samples_kernel, grid, arguments, options)], of_samples


@triton.jit
def _sum_sample_partials(
    dweight_ptr, dbias_ptr, dgate_ptr, partials, sample, samples, cols, col, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Sum one sample's columns of three arrays [partials, samples, cols] float32 over the partials.

    Returns the sums for weight, bias and gate, [1, BLOCK_N] each.  The sum of an array that is None is zero.  All
    are loaded at once, since their latency is most of the kernel's time.
    """
    lane = tl.arange(0, BLOCK_P)[:, None]
    dweights = tl.zeros((BLOCK_P, col.shape[1]), tl.float32)
    dbiases = tl.zeros((BLOCK_P, col.shape[1]), tl.float32)
    dgates = tl.zeros((BLOCK_P, col.shape[1]), tl.float32)
    for first in range(0, partials, BLOCK_P):
        mask = (first + lane < partials) & (col < cols)
        at = ((first + lane).to(tl.int64) * samples + sample) * cols + col
        if dweight_ptr is not None:
            dweights += tl.load(dweight_ptr + at, mask=mask, other=0.0)
        if dbias_ptr is not None:
            dbiases += tl.load(dbias_ptr + at, mask=mask, other=0.0)
        if dgate_ptr is not None:
            dgates += tl.load(dgate_ptr + at, mask=mask, other=0.0)
    of_weight = tl.sum(dweights, 0, keep_dims=True)
    of_bias = tl.sum(dbiases, 0, keep_dims=True)
    return of_weight, of_bias, tl.sum(dgates, 0, keep_dims=True)


@triton.jit(do_not_specialize=["partials", "samples", "cols", "modulation_stride"])
def layer_norm_backward_reduce_samples_kernel(
    dweight_partial_ptr,
    dbias_partial_ptr,
    dgate_partial_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    dscale_ptr,
    dshift_ptr,
    dgate_ptr,
    sample_dweight_ptr,
    sample_dbias_ptr,
    partials,
    samples,
    cols,
    modulation_stride: tl.int64,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Reduce partial sums [partials, samples, cols] in a fixed order, BLOCK_N columns of a sample per program.

    With A and B the sums of dz * x_hat and of dz over the rows of a sample, dscale = weight * A + bias * B and
    dshift = B.  The sample's share of dweight and dbias, [samples, cols] float32, is (1 + scale) * A and
    (1 + scale) * B.  dgate is the sum of its partial sums.
    """
    await_previous_launch(EARLY)
    blocks = tl.cdiv(cols, BLOCK_N)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = col < cols
    at = sample * cols + col
    factor = tl.full((1, BLOCK_N), 1.0, tl.float32)
    if scale_ptr is not None:
        factor += load_parameter(scale_ptr, sample * modulation_stride + col, mask, 0.0)
    of_weight, of_bias, dgate = _sum_sample_partials(
        dweight_partial_ptr, dbias_partial_ptr, dgate_partial_ptr, partials, sample, samples, cols, col, BLOCK_P
    )
    dscale = tl.zeros((1, BLOCK_N), tl.float32)
    if dweight_partial_ptr is not None:
        dscale = of_weight * add_weight_offset(load_parameter(weight_ptr, col, mask, 1.0), WEIGHT_OFFSET)
        if sample_dweight_ptr is not None:
            tl.store(sample_dweight_ptr + at, of_weight * factor, mask=mask)
    if dbias_partial_ptr is not None:
        if bias_ptr is not None:
            dscale += of_bias * load_parameter(bias_ptr, col, mask, 0.0)
        if dshift_ptr is not None:
            tl.store(dshift_ptr + at, of_bias.to(dshift_ptr.dtype.element_ty), mask=mask)
        if sample_dbias_ptr is not None:
            tl.store(sample_dbias_ptr + at, of_bias * factor, mask=mask)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + at, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


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
