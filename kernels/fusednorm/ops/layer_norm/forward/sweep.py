"""Forward pass of LayerNorm and RMSNorm with one program per row, read twice, or three times for a float8 y."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.epilogue import apply_epilogue
from fusednorm.jit.float8 import compute_float8_scale, compute_magnitude
from fusednorm.jit.heads import (
    compute_modulation_offset,
    compute_parameter_offset,
    compute_row_index,
    compute_row_offset,
    locate_program_among_heads,
)
from fusednorm.jit.loads import load_gate, load_row_residual_sum, make_column_mask
from fusednorm.jit.moments import compute_row_mean_and_variance, store_row_statistics
from fusednorm.jit.prefetch import FEW_PROGRAMS, prefetch, prefetch_parameters, prefetch_row_ahead
from fusednorm.jit.reductions import reduce_maximum
from fusednorm.jit.tiles import normalise
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm.call import LayerNormForwardCall


@dataclass(frozen=True, slots=True)
class LayerNormForwardSweep:
    """A configuration in which each program reads one row twice, or three times for a float8 y.

    A row is read in chunks of `block_n` columns.  It is the only algorithm for heads and samples whose rows do not
    fit one program: over 65536 columns in 16 bits and 32768 in float32, with a residual over 32768 and 24576.
    It has two other uses, for which `LayerNormForwardSplit` would be slower: such rows without heads up to
    524288 columns if programs may not wait for one another, and passes that compute only the statistics of
    shorter rows for a cooperative backward.

    A program prefetches the row (number of multiprocessors * `prefetch_distance_per_sm`) rows later into L2.
    """

    block_n: int
    num_warps: int
    prefetch_distance_per_sm: int = 0

    def make_options(self, cols: int, itemsize: int) -> dict[str, object]:
        """Make the constexprs for this configuration's chunks, and the number of warps.

        The forward kernel and that of a chain of LayerNorms have them in common.  Rows have `cols` elements of
        `itemsize` bytes.
        """
        return {
            "BLOCK_N": self.block_n,
            "EVEN": cols % self.block_n == 0,
            "GROUP": 16 // itemsize,
            "num_warps": self.num_warps,
        }


def plan_sweep_forward(call: LayerNormForwardCall, config: LayerNormForwardSweep) -> list[Launch]:
    """Plan the one launch of a pass over rows of any length, which are read twice, or three times for float8."""
    layout = call.make_head_layout() if call.y_scale is None else call.make_float8_layout()
    options = {
        **config.make_options(call.cols, call.itemsize),
        "PREFETCH": call.can_prefetch_rows(layout),
        "HEADS": layout.heads,
        "IS_RMS": call.options.is_rms,
        **call.make_common_constexprs(layout.vec),
    }
    ahead = config.prefetch_distance_per_sm * call.multiprocessors
    arguments = (
        *call.tensors,
        call.y_scale,
        *call.modulation_arguments(layout.vec),
        ahead,
        *layout.sizes,
        call.options.eps,
        *call.options.epilogue_arguments,
    )
    return [
        Launch(
            layer_norm_forward_sweep_kernel, call.make_grid(call.rows), arguments, options, call.one_row_dependence
        )
    ]


@triton.jit(
    do_not_specialize=[
        "samples",
        "modulation_units",
        "ahead",
        "col_units",
        "x_row_units",
        "residual_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_forward_sweep_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    y_scale_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    samples,
    modulation_units: tl.int64,
    ahead,
    col_units,
    x_row_units: tl.int64,
    residual_row_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of one row per program in two sweeps: a sweep for the moments, then a sweep that writes y.

    The second sweep reads backwards, because the end of the row is still in L1 or L2.  With a y_scale, y
    is float8: the second sweep, backwards too, computes the largest |y|, and a third one y.  A lane of these is
    the GROUP columns that one thread loads at once, as in `compute_row_mean_and_variance`.

    A program prefetches the row of the program `ahead` programs later into L2; 0 for none.
    """
    cols = col_units * VEC
    program, programs, head, heads = locate_program_among_heads(samples, HEADS)
    token = program.to(tl.int64) + tl.zeros((1, 1), tl.int64)
    row = compute_row_index(token, head, programs, heads, HEADS)
    if y_scale_ptr is None:
        col = tl.arange(0, BLOCK_N)[None, :]
    else:
        lane_col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP
        col = tl.arange(0, GROUP)[None, :]
    x_row = compute_row_offset(token, row, head, x_row_units * VEC, cols, HEADS)
    residual_row = compute_row_offset(token, row, head, residual_row_units * VEC, cols, HEADS)
    own = compute_parameter_offset(head, cols, HEADS)
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS)
    if gate_ptr is not None:
        gate_ptr += modulation
    y_row = row * cols.to(tl.int64)
    chunks = tl.cdiv(cols, BLOCK_N)

    if PREFETCH:
        # Passes with a float8 y lack this branch: with silu and dropout it costs 72 registers in place of 64, so a
        # multiprocessor has one program in place of two, and the pass takes 1.22 times as long (Triton 3.6, H100,
        # bfloat16, 24576 and 65536 columns).
        if y_scale_ptr is None and tl.num_programs(0) <= FEW_PROGRAMS:
            # Nothing else hides this program's latency, so it prefetches all of its row at once.
            prefetch(x_ptr + tl.program_id(0).to(tl.int64) * (x_row_units * VEC), cols)
            prefetch_parameters(weight_ptr, bias_ptr, 0, cols)
        else:
            prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    rough, shift, variance = compute_row_mean_and_variance(
        x_ptr, residual_ptr, gate_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, GROUP, IS_RMS
    )
    rstd = approximate_rsqrt(variance + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, rough, shift, rstd, None)

    if weight_ptr is not None:
        weight_ptr += own
    if bias_ptr is not None:
        bias_ptr += own
    if scale_ptr is not None:
        scale_ptr += modulation
    if shift_ptr is not None:
        shift_ptr += modulation
    if y_scale_ptr is not None:
        largest = tl.zeros((BLOCK_N // GROUP, 1), tl.float32)
        for step in range(0, chunks):
            first_col = lane_col + (chunks - 1 - step) * BLOCK_N
            at = first_col + col
            mask = make_column_mask(at, cols, EVEN)
            gates = load_gate(gate_ptr, at, mask)
            _, h = load_row_residual_sum(
                x_ptr, residual_ptr, gates, x_row + at, residual_row + at, mask, "evict_last"
            )
            y = normalise(
                h, rough, shift, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, at, mask, IS_RMS, WEIGHT_OFFSET
            )
            y = apply_epilogue(
                y, row, first_col, seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT
            )
            of_lane = reduce_maximum(compute_magnitude(y, mask, EVEN), 1)
            largest = tl.maximum(largest, of_lane, propagate_nan=tl.PropagateNan.ALL)
        y_scale = compute_float8_scale(reduce_maximum(largest, 0))
        tl.store(y_scale_ptr + row, y_scale)
        inverse = 1.0 / y_scale

    if y_ptr is not None:
        for step in range(0, chunks):
            if y_scale_ptr is None:
                first_col = (chunks - 1 - step) * BLOCK_N
            else:
                first_col = lane_col + step * BLOCK_N
            at = col + first_col
            mask = make_column_mask(at, cols, EVEN)
            gates = load_gate(gate_ptr, at, mask)
            _, h = load_row_residual_sum(
                x_ptr, residual_ptr, gates, x_row + at, residual_row + at, mask, "evict_first"
            )
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + y_row + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            y = normalise(
                h, rough, shift, rstd, weight_ptr, bias_ptr, scale_ptr, shift_ptr, at, mask, IS_RMS, WEIGHT_OFFSET
            )
            y = apply_epilogue(
                y, row, first_col, seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT
            )
            if y_scale_ptr is not None:
                y = y * inverse
            y = y.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + y_row + at, y, mask=mask, eviction_policy="evict_first")
