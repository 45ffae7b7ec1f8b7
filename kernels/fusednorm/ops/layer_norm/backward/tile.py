"""Backward pass of LayerNorm and RMSNorm over tiles of rows, read once.

With dz the gradient before the activation and g = dz * (1 + scale) * (weight + WEIGHT_OFFSET), the gradient of
the norm's input is dh = rstd * (g - c2 - x_hat * c1), where c1 = mean(g * x_hat) and c2 = mean(g) over the row
(c2 = 0 for RMSNorm).  dresidual is dh, and dx gate * dh; scale is 0 and gate 1 where they are not given.  Sums
over rows for the gradients of parameters stay in float32 registers, one partial row a program, and
`backward.partial_reduction` adds up the partials in fixed order: no atomics and no locks, so every run gives the
same bits.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.heads import (
    compute_modulation_offset,
    compute_parameter_offset,
    compute_row_index,
    compute_row_offset,
    locate_program_among_heads,
)
from fusednorm.jit.loads import (
    load_gate,
    load_row_residual_sum,
    make_column_mask,
    make_unaligned_zero,
    widen,
)
from fusednorm.jit.moments import compute_tile_moments
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import multiply_for_uniform_sum, sum_pair
from fusednorm.launch.launches import Launch, RowDependence, can_prefetch, compute_max_registers, fit_stages
from fusednorm.ops.layer_norm.backward.partial_reduction import PartialGradients, plan_partial_reduction
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.gradient_steps import (
    backpropagate_epilogue,
    combine_affine_steps,
    load_affine_steps,
    store_input_gradients,
)


@dataclass(frozen=True, slots=True)
class LayerNormBackwardTile:
    """A configuration in which each persistent program processes many tiles of `rows` complete rows.

    A tile is held as `chunks` blocks of `block_n` columns; `stages` - 1 later tiles are loaded ahead into
    shared memory.  `holds_weight` keeps weight in registers for all tiles; otherwise each tile loads it
    again from L1.  A program prefetches its tile `ahead` iterations later into L2.

    The compiler may use as many registers as leave room for `programs_per_sm` programs on a multiprocessor.
    """

    rows: int
    block_n: int
    num_warps: int
    stages: int
    programs_per_sm: int
    holds_weight: bool
    chunks: int = 1
    ahead: int = 0

    def compute_stages(self, column_bytes: int) -> int:
        """Compute the number of pipeline stages that fit into shared memory, at most `stages`.

        A tile has `column_bytes` bytes per column of a row.  `stages` assumes that only x and dy use shared
        memory; residuals and parameters not held in registers use it too.
        """
        tile_bytes = self.rows * self.chunks * self.block_n * column_bytes * self.programs_per_sm
        return fit_stages(self.stages, tile_bytes)


def plan_tile_backward(call: LayerNormBackwardCall, config: LayerNormBackwardTile) -> list[Launch]:
    """Plan the launch for dx and partial sums over tiles of complete rows, and the one for parameter gradients."""
    layout = call.make_head_layout()
    pipelined = list(call.strided_inputs)
    if not config.holds_weight:
        pipelined += [call.weight, call.scale, call.gate]
        if call.options.activation != "none":
            pipelined += [call.bias, call.shift]
    column_bytes = sum(tensor.element_size() for tensor in pipelined if tensor is not None)
    most = max(1, call.compute_max_programs(config.programs_per_sm))
    programs = min(cdiv(call.rows, config.rows), most)
    # Without heads the allocation is the same for any number of rows, on which only the number of programs depends.
    partials = PartialGradients.allocate(call, programs, most if call.x.ndim == 2 else None)
    cols, dy_row, x_row, *_ = layout.sizes
    is_dense = dy_row == x_row == cols
    options = {
        "ROWS": config.rows,
        "CHUNKS": config.chunks,
        "BLOCK_N": config.block_n,
        "FULL": min(call.cols // config.block_n, config.chunks),
        "STAGES": config.compute_stages(column_bytes),
        "AHEAD": config.ahead if is_dense and can_prefetch(layout.vec, call.x, call.dy) else 0,
        "EARLY_REDUCE": call.can_reduce_early,
        "HOLD_WEIGHT": config.holds_weight,
        "HEADS": layout.heads,
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        "maxnreg": compute_max_registers(config),
        **call.make_common_constexprs(layout.vec),
    }
    tensors = (
        *call.tensors, *call.modulation_arguments(layout.vec), call.mean, call.rstd, *call.input_gradients,
        partials.dweight, partials.dbias, partials.dgate,
    )  # fmt: skip
    arguments = (*tensors, call.rows, *layout.sizes, call.options.eps, *call.options.epilogue_arguments)
    by_rows = RowDependence(config.rows, most, rows_index=len(tensors)) if call.x.ndim == 2 else None
    return [
        Launch(layer_norm_backward_tile_kernel, call.make_grid(programs), arguments, options, by_rows),
        *plan_partial_reduction(call, partials, call.multiprocessors * config.programs_per_sm, by_rows),
    ]


@triton.jit(
    do_not_specialize=[
        "samples",
        "modulation_units",
        "rows",
        "col_units",
        "dy_row_units",
        "x_row_units",
        "residual_row_units",
        "dresidual_out_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_backward_tile_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    samples,
    modulation_units: tl.int64,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    dgate_partial_ptr,
    rows: tl.int64,
    col_units,
    dy_row_units: tl.int64,
    x_row_units: tl.int64,
    residual_row_units: tl.int64,
    dresidual_out_row_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
    HOLD_WEIGHT: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write dx of tiles of ROWS complete rows, and each program's partial sums for the parameters.

    A tile is held as CHUNKS blocks of BLOCK_N columns, the first FULL of which need no mask.  Programs are
    persistent.  Statistics that are not saved are computed.

    With AHEAD > 0, for rows without gaps, a program prefetches its tile AHEAD iterations later into L2.
    """
    allow_next_launch(EARLY_REDUCE)
    cols = col_units * VEC
    n = cols.to(tl.float32)
    inverse_n = 1.0 / n
    program, programs, head, heads = locate_program_among_heads(samples, HEADS)
    NARROW: tl.constexpr = VEC * x_ptr.dtype.element_ty.primitive_bitwidth < 128
    EVICT: tl.constexpr = "" if NARROW else "evict_first"
    own = compute_parameter_offset(head, cols, HEADS) + make_unaligned_zero(cols, NARROW)
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS) + make_unaligned_zero(cols, NARROW)
    columns = ()
    col_masks = ()
    held = ()
    held_biases = ()
    held_scales = ()
    held_shifts = ()
    held_gates = ()
    dweights = ()
    dbiases = ()
    dgates = ()
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        col_mask = make_column_mask(col, cols, i < FULL)
        columns = columns + (col,)
        col_masks = col_masks + (col_mask,)
        if HOLD_WEIGHT and weight_ptr is not None:
            held = held + (tl.load(weight_ptr + own + col, mask=col_mask, other=0.0),)
        if HOLD_WEIGHT and ACTIVATION != "none" and bias_ptr is not None:
            held_biases = held_biases + (tl.load(bias_ptr + own + col, mask=col_mask, other=0.0),)
        if HOLD_WEIGHT and scale_ptr is not None:
            held_scales = held_scales + (tl.load(scale_ptr + modulation + col, mask=col_mask, other=0.0),)
        if HOLD_WEIGHT and ACTIVATION != "none" and shift_ptr is not None:
            held_shifts = held_shifts + (tl.load(shift_ptr + modulation + col, mask=col_mask, other=0.0),)
        if HOLD_WEIGHT:
            held_gates = held_gates + load_gate(gate_ptr, modulation + col, col_mask)
        if dweight_partial_ptr is not None:
            dweights = dweights + (tl.zeros((ROWS, BLOCK_N), tl.float32),)
        if dbias_partial_ptr is not None:
            dbiases = dbiases + (tl.zeros((ROWS, BLOCK_N), tl.float32),)
        if dgate_partial_ptr is not None:
            dgates = dgates + (tl.zeros((ROWS, BLOCK_N), tl.float32),)

    tiles = tl.cdiv(rows, ROWS)

    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        if AHEAD > 0:
            first_ahead = (tile + AHEAD * programs).to(tl.int64) * ROWS
            if first_ahead < rows:
                present = (tl.minimum(rows - first_ahead, ROWS) * cols).to(tl.int32)
                if HEADS == "samples":
                    first_ahead += head.to(tl.int64) * rows
                prefetch(x_ptr + first_ahead * cols, present)
                prefetch(dy_ptr + first_ahead * cols, present)
        token = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = token < rows
        row = compute_row_index(token, head, rows, heads, HEADS)
        x_row = compute_row_offset(token, row, head, x_row_units * VEC, cols, HEADS)
        residual_row = compute_row_offset(token, row, head, residual_row_units * VEC, cols, HEADS)
        dy_row = compute_row_offset(token, row, head, dy_row_units * VEC, cols, HEADS)
        gates = held_gates
        xs = ()
        chunks = ()
        dys = ()
        for i in tl.static_range(CHUNKS):
            mask = row_mask & col_masks[i]
            if not HOLD_WEIGHT:
                gates = gates + load_gate(gate_ptr, modulation + columns[i], col_masks[i])
            x, h = load_row_residual_sum(
                x_ptr, residual_ptr, gates[i : i + 1], x_row + columns[i], residual_row + columns[i], mask, EVICT
            )
            xs = xs + (x,)
            chunks = chunks + (h,)
            dy = tl.load(dy_ptr + dy_row + columns[i], mask=mask, other=0.0, eviction_policy=EVICT)
            dys = dys + (widen(dy),)
        if rstd_ptr is not None:
            rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
            shift = tl.zeros_like(rstd)
            if IS_RMS:
                mean = shift
            else:
                mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        else:
            mean, shift, square = compute_tile_moments(chunks, col_masks, n, FULL, IS_RMS)
            rstd = approximate_rsqrt(square * inverse_n + eps)
            if ROWS > 1:
                # A tile's rows past the last one have no variance: with an eps of 0, x_hat would be NaN there.
                rstd = tl.where(row_mask, rstd, 0.0)

        x_hats = ()
        gs = ()
        new_dweights = ()
        new_dbiases = ()
        for i in tl.static_range(CHUNKS):
            if IS_RMS:
                x_hat = chunks[i] * rstd
            elif rstd_ptr is not None:
                x_hat = (chunks[i] - mean) * rstd
            else:
                x_hat = (chunks[i] - mean) * rstd - shift * rstd
            if HOLD_WEIGHT:
                weight, bias = combine_affine_steps(
                    held, held_biases, held_scales, held_shifts, i, columns[i], WEIGHT_OFFSET, ACTIVATION
                )
            else:
                weight, bias = load_affine_steps(
                    weight_ptr, bias_ptr, scale_ptr, shift_ptr, own, modulation, columns[i], col_masks[i],
                    WEIGHT_OFFSET, ACTIVATION,
                )  # fmt: skip
            dz = backpropagate_epilogue(
                dys[i],
                x_hat,
                weight,
                bias,
                row,
                i * BLOCK_N,
                seed,
                dropout_threshold,
                dropout_scale,
                negative_slope,
                ACTIVATION,
                DROPOUT,
            )
            if dweight_partial_ptr is not None:
                new_dweights = new_dweights + (dweights[i] + dz * x_hat,)
            if dbias_partial_ptr is not None:
                new_dbiases = new_dbiases + (dbiases[i] + dz,)
            g = dz * weight
            if i == 0:
                # Not g itself: if one of its columns is a rounded product, some specialisations spill.
                total = multiply_for_uniform_sum(dz, weight)
                if i >= FULL:
                    total = tl.where(col_masks[i], total, 0.0)
            if i >= FULL:
                # Past the row's end x_hat is not zero, and without a weight g may not be zero either.
                g = tl.where(col_masks[i], g, 0.0)
            x_hats = x_hats + (x_hat,)
            gs = gs + (g,)
        dweights = new_dweights
        dbiases = new_dbiases

        products = multiply_for_uniform_sum(gs[0], x_hats[0])
        for i in tl.static_range(1, CHUNKS):
            products += gs[i] * x_hats[i]
            total += gs[i]
        if IS_RMS:
            c1 = tl.sum(products, 1, keep_dims=True)
            c2 = tl.zeros_like(c1)
        else:
            c1, c2 = sum_pair(products, total, 1)
        new_dgates = ()
        for i in tl.static_range(CHUNKS):
            dh = gs[i] - x_hats[i] * (c1 * inverse_n)
            if not IS_RMS:
                dh -= c2 * inverse_n
            dh *= rstd
            mask = row_mask & col_masks[i]
            if dresidual_out_ptr is not None:
                outside_row = compute_row_offset(token, row, head, dresidual_out_row_units * VEC, cols, HEADS)
                dh += tl.load(dresidual_out_ptr + outside_row + columns[i], mask=mask, other=0.0).to(tl.float32)
            if dgate_partial_ptr is not None:
                new_dgates = new_dgates + (dgates[i] + dh * widen(xs[i]),)
            store_input_gradients(
                dh, gates[i : i + 1], dx_ptr, dresidual_ptr, row * cols.to(tl.int64), columns[i], mask, EVICT
            )
        dgates = new_dgates

    partial_row = (program.to(tl.int64) * heads + head) * cols
    for i in tl.static_range(CHUNKS):
        at = partial_row + columns[i]
        if dweight_partial_ptr is not None:
            tl.store(dweight_partial_ptr + at, tl.sum(dweights[i], 0, keep_dims=True), mask=col_masks[i])
        if dbias_partial_ptr is not None:
            tl.store(dbias_partial_ptr + at, tl.sum(dbiases[i], 0, keep_dims=True), mask=col_masks[i])
        if dgate_partial_ptr is not None:
            tl.store(dgate_partial_ptr + at, tl.sum(dgates[i], 0, keep_dims=True), mask=col_masks[i])
