"""Backward pass of LayerNorm and RMSNorm for rows too long for a tile: two kernels, which read x and dy twice.

The first computes the constants of each row, for long rows in parts; the second processes blocks of columns.  The
formulas are in `backward.tile`; `backward.partial_reduction` adds up the partial sums, unless each column has one
program for any number of rows, which then writes the gradients of the parameters itself.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.heads import compute_modulation_offset, compute_row_index, locate_program_among_heads
from fusednorm.jit.loads import load_gate, load_row_residual_sum, make_column_mask, widen
from fusednorm.jit.moments import compute_row_mean_and_variance
from fusednorm.jit.reductions import sum_pair, sum_pair_to_scalars
from fusednorm.launch.launches import Launch
from fusednorm.launch.workspaces import get_counters
from fusednorm.ops.layer_norm.backward.partial_reduction import PartialGradients, plan_partial_reduction
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.gradient_steps import (
    backpropagate_epilogue,
    load_affine_steps,
    store_input_gradients,
)

SHORTEST_ROW_IN_PARTS = 1 << 18
"""The shortest row whose sums several programs compute; shorter ones were not measured so."""

PART_CHUNKS = 4
"""The fewest chunks of a part of a row."""

MAX_PARTS = 1024
"""The most parts of a row, because one program adds up their sums at once."""


@dataclass(frozen=True, slots=True)
class LayerNormBackwardSplit:
    """A configuration in which no program waits for another.  One kernel computes four constants of each row,
    then another kernel computes dx.

    The constants are mean, rstd, c1 and c2, where c1 and c2 are the row's means of g * x_hat and of g in the
    formula of dx.  In the second kernel, a program has `block_n` columns and processes tiles of `rows` rows;
    `stages` - 1 later tiles are loaded ahead into shared memory.
    """

    constants_block_n: int
    constants_num_warps: int
    rows: int
    block_n: int
    num_warps: int
    stages: int
    programs_per_sm: int

    def divide_row(self, call: LayerNormBackwardCall) -> tuple[int, int]:
        """Divide a row among programs of the first kernel: into how many parts, of how many chunks each.

        Several parts need the row's statistics.
        """
        chunks = cdiv(call.cols, self.constants_block_n)
        if call.is_modulated or call.cols < SHORTEST_ROW_IN_PARTS:
            return 1, chunks
        part_chunks = max(PART_CHUNKS, cdiv(chunks, MAX_PARTS))
        return cdiv(chunks, part_chunks), part_chunks


def plan_split_backward(call: LayerNormBackwardCall, config: LayerNormBackwardSplit) -> list[Launch]:
    """Plan the launches for the constants of each row, dx and partial sums, and parameter gradients.

    Rows may have any length.  The constants are mean, rstd, c1 and c2, the row's means of g * x_hat and of g
    in the formula of dx.
    """
    layout = call.make_head_layout() if call.is_modulated else call.make_row_layout()
    samples = call.x.shape[1] if call.is_modulated else 1
    modulations = call.modulation_arguments(layout.vec)
    ranges = cdiv(call.cols, config.block_n)
    most_tiles = max(1, call.compute_max_programs(config.programs_per_sm) // ranges)
    tiles = min(cdiv(call.rows, config.rows), most_tiles)
    is_direct = most_tiles == 1 and not call.is_modulated
    partials = PartialGradients.from_results(call) if is_direct else PartialGradients.allocate(call, tiles)
    constants = new_workspace(call.x, call.rows * samples, 4)
    parts, part_chunks = config.divide_row(call)
    sums = Launch(
        layer_norm_backward_split_sums_kernel,
        (call.rows * samples * parts,),
        (
            call.dy, call.x, call.residual, call.weight, call.bias, *modulations, call.mean, call.rstd,
            constants, new_workspace(call.x, call.rows, parts, 2) if parts > 1 else None,
            get_counters(call.x.device, call.rows) if parts > 1 else None, parts, part_chunks,
            *layout.sizes[:4], call.options.eps, *call.options.epilogue_arguments,
        ),
        {
            "SLOTS": next_power_of_2(parts),
            "BLOCK_N": config.constants_block_n,
            "GROUP": 16 // call.itemsize,
            "EVEN": call.cols % config.constants_block_n == 0,
            "IS_RMS": call.options.is_rms,
            "HEADS": layout.heads,
            "num_warps": config.constants_num_warps,
            **call.make_common_constexprs(layout.vec),
        },
    )  # fmt: skip
    apply = Launch(
        layer_norm_backward_split_apply_kernel,
        (ranges * samples, tiles),
        (
            *call.tensors, *modulations, constants, *call.input_gradients, partials.dweight, partials.dbias,
            partials.dgate, call.rows, *layout.sizes, *call.options.epilogue_arguments,
        ),
        {
            "ROWS": config.rows,
            "BLOCK_N": config.block_n,
            "EVEN": call.cols % config.block_n == 0,
            "STAGES": config.stages,
            "HEADS": layout.heads,
            "num_warps": config.num_warps,
            **call.make_common_constexprs(layout.vec),
        },
    )  # fmt: skip
    return [sums, apply, *plan_partial_reduction(call, partials, most_tiles)]


@triton.jit
def _store_constants(constants_ptr, row, rough, shift, rstd, c1, c2):
    """Store the constants of a row, mean (rough + shift), rstd, c1 and c2, to `constants_ptr`, [rows, 4]."""
    tl.store(constants_ptr + row * 4, rough + shift)
    tl.store(constants_ptr + row * 4 + 1, rstd)
    tl.store(constants_ptr + row * 4 + 2, c1)
    tl.store(constants_ptr + row * 4 + 3, c2)


@triton.jit(
    do_not_specialize=[
        "samples",
        "modulation_units",
        "parts",
        "part_chunks",
        "col_units",
        "dy_row_units",
        "x_row_units",
        "residual_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_backward_split_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    samples,
    modulation_units: tl.int64,
    mean_ptr,
    rstd_ptr,
    constants_ptr,
    parts_ptr,
    counters_ptr,
    parts,
    part_chunks,
    col_units,
    dy_row_units: tl.int64,
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
    IS_RMS: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write each row's constants mean, rstd, c1 and c2 to `constants_ptr`, [rows, 4] float32.  Each program
    has one row or, unless parts_ptr is None, one of `parts` parts of a row: `part_chunks` chunks of BLOCK_N
    columns.

    c1 and c2 are the row's means of g * x_hat and of g in the formula of dx.  If mean and rstd were not
    saved, a first sweep over the row computes them; the second sweep then finds x in the cache.

    The sums of parts are written to `parts_ptr`, [rows, parts, 2].  The last program of a row to finish, by
    `counters_ptr`, [rows] int64, adds them up in the order of the parts, and resets the row's counter to 0.
    """
    cols = col_units * VEC
    inverse_n = 1.0 / cols.to(tl.float32)
    program, programs, head, heads = locate_program_among_heads(samples, HEADS)
    first_chunk = 0
    last_chunk = tl.cdiv(cols, BLOCK_N)
    if parts_ptr is not None:
        first_chunk = program % parts * part_chunks
        last_chunk = tl.minimum(first_chunk + part_chunks, last_chunk)
        program = program // parts
    token = program.to(tl.int64) + tl.zeros((1, 1), tl.int64)
    row = compute_row_index(token, head, programs, heads, HEADS)
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS)
    if gate_ptr is not None:
        gate_ptr += modulation
    col = tl.arange(0, BLOCK_N)[None, :]
    x_row = row * (x_row_units * VEC)
    residual_row = row * (residual_row_units * VEC)
    dy_row = row * (dy_row_units * VEC)
    shift = tl.zeros((1, 1), tl.float32)
    if rstd_ptr is not None:
        rstd = tl.load(rstd_ptr + row)
        if IS_RMS:
            rough = tl.zeros((1, 1), tl.float32)
        else:
            rough = tl.load(mean_ptr + row)
    else:
        rough, shift, variance = compute_row_mean_and_variance(
            x_ptr, residual_ptr, gate_ptr, x_row, residual_row, cols, EVEN, BLOCK_N, GROUP, IS_RMS
        )
        rstd = approximate_rsqrt(variance + eps)

    lane_c1 = tl.zeros((1, BLOCK_N), tl.float32)
    lane_c2 = tl.zeros((1, BLOCK_N), tl.float32)
    for chunk in range(first_chunk, last_chunk):
        first_col = chunk * BLOCK_N
        at = col + first_col
        mask = make_column_mask(at, cols, EVEN)
        gates = load_gate(gate_ptr, at, mask)
        _, h = load_row_residual_sum(x_ptr, residual_ptr, gates, x_row + at, residual_row + at, mask, "")
        dy = widen(tl.load(dy_ptr + dy_row + at, mask=mask, other=0.0))
        x_hat = ((h - rough) - shift) * rstd
        weight, bias = load_affine_steps(
            weight_ptr, bias_ptr, scale_ptr, shift_ptr, 0, modulation, at, mask, WEIGHT_OFFSET, ACTIVATION
        )
        dz = backpropagate_epilogue(
            dy,
            x_hat,
            weight,
            bias,
            row,
            first_col,
            seed,
            dropout_threshold,
            dropout_scale,
            negative_slope,
            ACTIVATION,
            DROPOUT,
        )
        g = dz * weight
        if not EVEN:
            g = tl.where(mask, g, 0.0)
        lane_c1 += g * x_hat
        if not IS_RMS:
            lane_c2 += g
    c1, c2 = sum_pair(lane_c1, lane_c2, 1)
    if parts_ptr is not None:
        part_ptr = parts_ptr + (row * parts + first_chunk // part_chunks) * 2
        tl.store(part_ptr, c1)
        tl.store(part_ptr + 1, c2)
        tl.debug_barrier()
        token_row = tl.program_id(0) // parts
        if tl.atomic_add(counters_ptr + token_row, 1, sem="acq_rel") + 1 == parts:
            tl.store(counters_ptr + token_row, 0)
            slot = tl.arange(0, SLOTS)
            slot_ptrs = parts_ptr + (token_row.to(tl.int64) * parts + slot) * 2
            # Bypass L1, which may hold values from before the other programs' writes.
            part_c1 = tl.load(slot_ptrs, mask=slot < parts, other=0.0, cache_modifier=".cg")
            part_c2 = tl.load(slot_ptrs + 1, mask=slot < parts, other=0.0, cache_modifier=".cg")
            row_c1, row_c2 = sum_pair_to_scalars(part_c1, part_c2)
            _store_constants(constants_ptr, row, rough, shift, rstd, row_c1 * inverse_n, row_c2 * inverse_n)
    else:
        _store_constants(constants_ptr, row, rough, shift, rstd, c1 * inverse_n, c2 * inverse_n)


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
def layer_norm_backward_split_apply_kernel(
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
    constants_ptr,
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
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write dx, and partial sums for the parameter gradients.  Each program handles a range of BLOCK_N columns
    of many rows, which are of one sample if there are samples.

    A program processes every num_programs(1)-th tile of rows, last rows first.
    `layer_norm_backward_split_sums_kernel` wrote `constants_ptr`, [rows, 4], and left the last rows in the
    cache.
    """
    cols = col_units * VEC
    block, _, head, heads = locate_program_among_heads(samples, HEADS)
    first_col = block * BLOCK_N
    col = first_col + tl.arange(0, BLOCK_N)[None, :]
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS)
    col_mask = make_column_mask(col, cols, EVEN)
    weight, bias = load_affine_steps(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, 0, modulation, col, col_mask, WEIGHT_OFFSET, ACTIVATION
    )
    gates = load_gate(gate_ptr, modulation + col, col_mask)
    if dweight_partial_ptr is not None:
        dweight = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if dbias_partial_ptr is not None:
        dbias = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if dgate_partial_ptr is not None:
        dgate = tl.zeros((ROWS, BLOCK_N), tl.float32)

    tiles = tl.cdiv(rows, ROWS)
    for step in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        token = (tiles - 1 - step) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = token < rows
        row = compute_row_index(token, head, rows, heads, HEADS)
        mask = row_mask & col_mask
        x, h = load_row_residual_sum(
            x_ptr,
            residual_ptr,
            gates,
            row * (x_row_units * VEC) + col,
            row * (residual_row_units * VEC) + col,
            mask,
            "evict_first",
        )
        dy_at = row * (dy_row_units * VEC) + col
        dy = widen(tl.load(dy_ptr + dy_at, mask=mask, other=0.0, eviction_policy="evict_first"))
        mean = tl.load(constants_ptr + row * 4, mask=row_mask, other=0.0)
        rstd = tl.load(constants_ptr + row * 4 + 1, mask=row_mask, other=0.0)
        c1 = tl.load(constants_ptr + row * 4 + 2, mask=row_mask, other=0.0)
        c2 = tl.load(constants_ptr + row * 4 + 3, mask=row_mask, other=0.0)
        x_hat = (h - mean) * rstd
        dz = backpropagate_epilogue(
            dy,
            x_hat,
            weight,
            bias,
            row,
            first_col,
            seed,
            dropout_threshold,
            dropout_scale,
            negative_slope,
            ACTIVATION,
            DROPOUT,
        )
        if dweight_partial_ptr is not None:
            dweight += dz * x_hat
        if dbias_partial_ptr is not None:
            dbias += dz
        dh = (dz * weight - c2 - x_hat * c1) * rstd
        if dresidual_out_ptr is not None:
            outside_at = row * (dresidual_out_row_units * VEC) + col
            dh += tl.load(dresidual_out_ptr + outside_at, mask=mask, other=0.0).to(tl.float32)
        if dgate_partial_ptr is not None:
            dgate += dh * widen(x)
        store_input_gradients(dh, gates, dx_ptr, dresidual_ptr, row * cols.to(tl.int64), col, mask, "evict_first")

    partial_at = (tl.program_id(1).to(tl.int64) * heads + head) * cols + col
    if dweight_partial_ptr is not None:
        tl.store(dweight_partial_ptr + partial_at, tl.sum(dweight, 0, keep_dims=True), mask=col_mask)
    if dbias_partial_ptr is not None:
        tl.store(dbias_partial_ptr + partial_at, tl.sum(dbias, 0, keep_dims=True), mask=col_mask)
    if dgate_partial_ptr is not None:
        tl.store(dgate_partial_ptr + partial_at, tl.sum(dgate, 0, keep_dims=True), mask=col_mask)
