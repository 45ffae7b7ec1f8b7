"""Several consecutive LayerNorms; y is written once, and values between the norms stay float32.

`weight_ptrs` and `bias_ptrs` are tuples with an entry for each of NORMS norms, None where a norm has no such
parameter.  NORMS is an argument because Triton 3.6 cannot compute the length of a tuple that contains None.  Sizes
and strides are in units of VEC elements, as in `forward.tile`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.loads import load_row_residual_sum, make_column_mask
from fusednorm.jit.moments import compute_mean_and_variance_from_lane_sums, compute_tile_moments
from fusednorm.jit.prefetch import prefetch_row_ahead
from fusednorm.jit.reductions import multiply_for_uniform_sum
from fusednorm.jit.tiles import load_tile, normalise
from fusednorm.launch.launches import MAX_VEC, Launch, RowDependence, can_prefetch
from fusednorm.ops.layer_norm.call import RowLayout, list_row_strides
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import TILE_AHEAD_PER_SM, LayerNormForwardTile

Parameters = tuple[Array | None, ...]


@dataclass(frozen=True, slots=True)
class ChainCall:
    """The checked arguments of a chain of consecutive LayerNorms, with a weight and a bias for each norm.

    x and y are [rows, cols]; a weight or bias may be None.
    """

    x: Array
    weights: Parameters
    biases: Parameters
    eps: float
    y: Array

    @property
    def tensors(self) -> tuple[Array | Parameters, ...]:
        """The first arguments of the kernels."""
        return self.x, self.y, self.weights, self.biases

    @property
    def layout(self) -> RowLayout:
        """The layout of the rows."""
        cols = self.x.shape[1]
        return RowLayout.from_strides("none", cols, list_row_strides(cols, self.x), MAX_VEC)

    def compute_prefetch_distance(self, ahead_per_sm: int) -> int:
        """Compute the distance in programs at which a program prefetches a later row into L2."""
        return ahead_per_sm * count_multiprocessors(self.x.device)

    def make_common_constexprs(self, vec: int) -> dict[str, object]:
        """Make the constexprs of both kernels."""
        return {"NORMS": len(self.weights), "VEC": vec}


def plan_tile_chain(call: ChainCall, config: LayerNormForwardTile) -> list[Launch]:
    """Plan the launch of a chain of LayerNorms over rows so short that registers hold them."""
    layout = call.layout
    rows, cols = call.x.shape
    options = {
        **config.make_options(cols),
        "PREFETCH": config.rows == 1 and can_prefetch(layout.vec, call.x),
        **call.make_common_constexprs(layout.vec),
    }
    arguments = (*call.tensors, call.compute_prefetch_distance(TILE_AHEAD_PER_SM), rows, *layout.sizes, call.eps)
    by_rows = RowDependence(config.rows, rows_index=len(call.tensors) + 1)
    return [Launch(layer_norm_chain_tile_kernel, (cdiv(rows, config.rows),), arguments, options, by_rows)]


def plan_sweep_chain(call: ChainCall, config: LayerNormForwardSweep) -> list[Launch]:
    """Plan the launch of a chain of LayerNorms over rows of any length, each read several times."""
    layout = call.layout
    rows, cols = call.x.shape
    options = {
        **config.make_options(cols, call.x.element_size()),
        "PREFETCH": can_prefetch(layout.vec, call.x),
        **call.make_common_constexprs(layout.vec),
    }
    arguments = (
        *call.tensors,
        call.compute_prefetch_distance(config.prefetch_distance_per_sm),
        *layout.sizes,
        call.eps,
    )
    return [Launch(layer_norm_chain_sweep_kernel, (rows,), arguments, options, RowDependence())]


@triton.jit(do_not_specialize=["ahead", "rows", "col_units", "x_row_units"])
def layer_norm_chain_tile_kernel(
    x_ptr,
    y_ptr,
    weight_ptrs,
    bias_ptrs,
    ahead,
    rows: tl.int64,
    col_units,
    x_row_units: tl.int64,
    eps: tl.float32,
    NORMS: tl.constexpr,
    VEC: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Apply all norms of a chain to one tile of ROWS rows per program, and write y.

    The tile stays in registers, as CHUNKS blocks of BLOCK_N columns, for all norms; the first FULL blocks need no
    mask.

    With PREFETCH (ROWS is 1) a program prefetches the row of the program `ahead` programs later into L2.
    """
    cols = col_units * VEC
    n = cols.to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    row_mask = row < rows
    x_row = row * (x_row_units * VEC)
    columns, col_masks, chunks = load_tile(x_ptr, None, (), x_row, x_row, row_mask, cols, FULL, BLOCK_N, CHUNKS)
    if PREFETCH:
        prefetch_row_ahead(x_ptr, None, ahead, x_row_units * VEC, 0, cols)
    for norm in tl.static_range(NORMS):
        pivot, shift, square = compute_tile_moments(chunks, col_masks, n, FULL, False)
        rstd = approximate_rsqrt(square / n + eps)
        after = ()
        for i in tl.static_range(CHUNKS):
            y = normalise(
                chunks[i], pivot, shift, rstd, weight_ptrs[norm], bias_ptrs[norm], None, None,
                columns[i], col_masks[i], False, 0.0,
            )  # fmt: skip
            if i >= FULL:
                y = tl.where(col_masks[i], y, 0.0)
            after = after + (y,)
        chunks = after

    for i in tl.static_range(CHUNKS):
        y = chunks[i].to(y_ptr.dtype.element_ty)
        y_at = row * cols.to(tl.int64) + columns[i]
        tl.store(y_ptr + y_at, y, mask=row_mask & col_masks[i])


@triton.jit
def _load_after_norms(x_ptr, x_row, weight_ptrs, bias_ptrs, roughs, shifts, rstds, at, mask, EVICT: tl.constexpr):
    """Load a chunk of x and apply those norms of the chain whose moments are already known.

    The moments of these first norms are in `roughs`, `shifts` and `rstds`.  `at` and `mask` are the chunk's
    columns and their mask.
    """
    _, h = load_row_residual_sum(x_ptr, None, (), x_row + at, x_row + at, mask, EVICT)
    for norm in tl.static_range(len(rstds)):
        h = normalise(
            h, roughs[norm], shifts[norm], rstds[norm], weight_ptrs[norm], bias_ptrs[norm], None, None,
            at, mask, False, 0.0,
        )  # fmt: skip
    return h


@triton.jit
def _compute_lane_sums(h, pivot, mask, EVEN: tl.constexpr):
    """Compute the sums of h - pivot and of (h - pivot)^2 over each lane's columns, [lanes, 1] each.

    h and `mask` are a chunk, [lanes, GROUP]: a lane is the GROUP columns that a thread loads at once.
    """
    d = h - pivot
    if not EVEN:
        d = tl.where(mask, d, 0.0)
    return tl.sum(d, 1, keep_dims=True), tl.sum(multiply_for_uniform_sum(d, d), 1, keep_dims=True)


@triton.jit
def _compute_row_mean_and_variance_after_norms(
    x_ptr,
    x_row,
    weight_ptrs,
    bias_ptrs,
    roughs,
    shifts,
    rstds,
    cols,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the moments that a row has after the first norms of the chain.  For this, x is read and these
    norms are applied to it.

    The results are rough, shift and variance, as in `compute_row_mean_and_variance`: the mean is rough + shift.
    The moments of the first norms are in `roughs`, `shifts` and `rstds`.

    The row is longer than BLOCK_N.  The pivots are from the first chunk, which is full; every second norm
    reads the other chunks backwards.
    """
    lanes: tl.constexpr = BLOCK_N // GROUP
    col = tl.arange(0, lanes)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    chunks = tl.cdiv(cols, BLOCK_N)
    mask = make_column_mask(col, cols, True)
    h = _load_after_norms(x_ptr, x_row, weight_ptrs, bias_ptrs, roughs, shifts, rstds, col, mask, "evict_last")
    count = tl.full((lanes, 1), GROUP, tl.float32)
    pivot = tl.sum(h, 1, keep_dims=True) / GROUP
    sum_1, sum_2 = _compute_lane_sums(h, pivot, mask, True)
    for step in range(1, chunks):
        if len(rstds) % 2 == 0:
            chunk = step
        else:
            chunk = chunks - step
        at = col + chunk * BLOCK_N
        mask = make_column_mask(at, cols, EVEN)
        h = _load_after_norms(x_ptr, x_row, weight_ptrs, bias_ptrs, roughs, shifts, rstds, at, mask, "evict_last")
        more_1, more_2 = _compute_lane_sums(h, pivot, mask, EVEN)
        sum_1 += more_1
        sum_2 += more_2
        count += tl.sum(mask.to(tl.float32), 1, keep_dims=True)
    return compute_mean_and_variance_from_lane_sums(pivot, sum_1, sum_2, count, cols.to(tl.float32))


@triton.jit(do_not_specialize=["ahead", "col_units", "x_row_units"])
def layer_norm_chain_sweep_kernel(
    x_ptr,
    y_ptr,
    weight_ptrs,
    bias_ptrs,
    ahead,
    col_units,
    x_row_units: tl.int64,
    eps: tl.float32,
    NORMS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Apply all norms of a chain to one row per program, and write y.

    A sweep over the row computes the moments of each norm, and the last sweep writes y.  Sweeps alternate in
    direction, so that each starts with data that the previous sweep left in the cache.
    """
    cols = col_units * VEC
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    x_row = row * (x_row_units * VEC)
    y_row = row * cols.to(tl.int64)
    if PREFETCH:
        prefetch_row_ahead(x_ptr, None, ahead, x_row_units * VEC, 0, cols)
    roughs = ()
    shifts = ()
    rstds = ()
    for _ in tl.static_range(NORMS):
        rough, shift, variance = _compute_row_mean_and_variance_after_norms(
            x_ptr, x_row, weight_ptrs, bias_ptrs, roughs, shifts, rstds, cols, EVEN, BLOCK_N, GROUP
        )
        roughs = roughs + (rough,)
        shifts = shifts + (shift,)
        rstds = rstds + (approximate_rsqrt(variance + eps),)

    col = tl.arange(0, BLOCK_N)[None, :]
    chunks = tl.cdiv(cols, BLOCK_N)
    for step in range(0, chunks):
        if NORMS % 2 == 0:
            chunk = step
        else:
            chunk = chunks - 1 - step
        at = col + chunk * BLOCK_N
        mask = make_column_mask(at, cols, EVEN)
        y = _load_after_norms(x_ptr, x_row, weight_ptrs, bias_ptrs, roughs, shifts, rstds, at, mask, "evict_first")
        tl.store(y_ptr + y_row + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
