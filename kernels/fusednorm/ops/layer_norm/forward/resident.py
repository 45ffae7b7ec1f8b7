"""Forward pass of LayerNorm and RMSNorm in which a program keeps a row in registers, in the dtype of memory."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.heads import (
    compute_modulation_offset,
    compute_parameter_offset,
    compute_row_index,
    compute_row_offset,
    locate_program_among_heads,
)
from fusednorm.jit.loads import make_unaligned_zero
from fusednorm.jit.moments import store_row_statistics
from fusednorm.jit.prefetch import FEW_PROGRAMS, prefetch_parameters, prefetch_row_ahead
from fusednorm.jit.register_fragments import (
    add_residual_fragment,
    compute_fragment_moments,
    load_fragment,
    store_normalised_fragment,
    store_residual_sum,
)
from fusednorm.launch.launches import Launch, compute_max_registers, count_full_chunks
from fusednorm.ops.layer_norm.call import LayerNormForwardCall


@dataclass(frozen=True, slots=True)
class LayerNormForwardResident:
    """A configuration in which each program holds one row in registers, in the dtype of memory.

    The row is held as `chunks` chunks, with 8 columns per thread in a chunk.  Registers are limited so that
    `programs_per_sm` programs are resident on a multiprocessor.  A program prefetches the row (number of
    multiprocessors * `prefetch_distance_per_sm`) rows later into L2.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    prefetch_distance_per_sm: int = 0

    @property
    def block_n(self) -> int:
        """Columns of a chunk."""
        return 256 * self.num_warps


def plan_resident_forward(call: LayerNormForwardCall, config: LayerNormForwardResident) -> list[Launch]:
    """Plan the one launch of a pass over rows that fit the registers of one program."""
    layout, tensors = call.make_head_layout(), call.tensors
    access = call.make_access_options(layout.vec)
    merges_as_equals = call.can_merge_equal_sets(layout.vec, access, tensors)
    options = {
        "FULL": count_full_chunks(call.cols, config.block_n, config.chunks, merges_as_equals),
        "BLOCK_N": config.block_n,
        "CHUNKS": config.chunks,
        **access,
        "PREFETCH": call.can_prefetch_rows(layout),
        "ALONE": config.programs_per_sm == 1,
        "HEADS": layout.heads,
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        "maxnreg": compute_max_registers(config),
        **call.make_common_constexprs(layout.vec),
    }
    ahead = config.prefetch_distance_per_sm * call.multiprocessors
    arguments = (
        *tensors,
        *call.modulation_arguments(layout.vec),
        ahead,
        *layout.sizes,
        call.options.eps,
        *call.options.epilogue_arguments,
    )
    return [
        Launch(
            layer_norm_forward_resident_kernel,
            call.make_grid(call.rows),
            arguments,
            options,
            call.one_row_dependence,
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
def layer_norm_forward_resident_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
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
    FULL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    NARROW: tl.constexpr,
    PREFETCH: tl.constexpr,
    ALONE: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of one row per program.  The row is read once and held as CHUNKS chunks of BLOCK_N columns.

    The parameters are read after the reduction.  A program prefetches the row of the program `ahead`
    programs later into L2; 0 for none.  ALONE: whether a multiprocessor has only one program; the prefetch
    then starts after the row's statistics.
    """
    cols = col_units * VEC
    program, programs, head, heads = locate_program_among_heads(samples, HEADS)
    token = program.to(tl.int64)
    row = compute_row_index(token, head, programs, heads, HEADS)
    x_row = compute_row_offset(token, row, head, x_row_units * VEC, cols, HEADS)
    residual_row = compute_row_offset(token, row, head, residual_row_units * VEC, cols, HEADS)
    own = compute_parameter_offset(head, cols, HEADS) + make_unaligned_zero(cols, NARROW)
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS) + make_unaligned_zero(cols, NARROW)

    chunks = load_fragment(x_ptr, x_row, cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    residuals = load_fragment(residual_ptr, residual_row, cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    if gate_ptr is not None:
        # In float32 the sum takes no more registers than x and the residual in 16 bits.
        gates = load_fragment(gate_ptr, modulation, cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
        chunks = add_residual_fragment(chunks, residuals, gates)
        residuals = ()
    if PREFETCH:
        if tl.num_programs(0) <= FEW_PROGRAMS:
            # Nothing else hides the latency of the parameters.
            prefetch_parameters(weight_ptr, bias_ptr, 0, cols)
        elif not ALONE:
            prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    store_residual_sum(chunks, residuals, residual_out_ptr, row * cols.to(tl.int64), cols, FULL, BLOCK_N, GROUP)
    mean, shift, square = compute_fragment_moments(chunks, residuals, cols, FULL, BLOCK_N, GROUP, NARROW, IS_RMS)
    rstd = approximate_rsqrt(square / cols.to(tl.float32) + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, mean, shift, rstd, None)
    if PREFETCH and ALONE:
        # Any earlier, the prefetch would delay this row's statistics, with no other program to fill the gap.
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_units * VEC, residual_row_units * VEC, cols)
    store_normalised_fragment(
        chunks, residuals, weight_ptr, bias_ptr, own, scale_ptr, shift_ptr, modulation,
        y_ptr, row * cols.to(tl.int64), cols, row, 0,
        mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
        FULL, BLOCK_N, GROUP, NARROW, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT,
    )  # fmt: skip
