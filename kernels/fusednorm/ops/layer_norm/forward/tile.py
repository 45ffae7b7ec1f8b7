"""Forward pass of LayerNorm and RMSNorm over tiles of several rows, or of one short row; y may be float8.

Sizes and strides are in units of VEC elements, a constexpr.  The kernel multiplies them by VEC, so the compiler
knows that every address is a multiple of VEC and emits 128-bit accesses without specialising on the row length.
"""

import sys
from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
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
from fusednorm.jit.loads import add_one, add_weight_offset, load_gate, make_column_mask, widen
from fusednorm.jit.moments import compute_tile_moments, store_row_statistics
from fusednorm.jit.prefetch import prefetch_row_ahead
from fusednorm.jit.reductions import reduce_maximum
from fusednorm.jit.tiles import load_tile
from fusednorm.launch.launches import Launch, RowDependence, can_prefetch, fit_stages
from fusednorm.ops.layer_norm.call import LayerNormForwardCall

TILE_AHEAD_PER_SM = 2
"""The prefetch distance of float8 passes and chains over tiles of one row, in rows per multiprocessor."""

_FLOAT8_REGISTERS = 64
"""The most registers of a thread for a float8 y of one row in few chunks, with nothing fused, none of which spills.

Without a limit the compiler uses up to 91, with which half as many programs fit on a multiprocessor: 8192 rows of
16384 columns took 1.3 times as long.
"""

_MOST_LIGHT_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class LayerNormForwardTile:
    """A configuration in which each program holds a tile of `rows` complete rows in registers.

    The tile is held as `chunks` blocks of `block_n` columns.  With `stages` of 1 each tile has a program of its
    own.  With more, `programs_per_sm` persistent programs on each multiprocessor process many tiles, and load
    `stages` - 1 tiles ahead into shared memory; a program loads the parameters once.
    """

    rows: int
    chunks: int
    block_n: int
    num_warps: int
    stages: int = 1
    programs_per_sm: int = 0

    def compute_stages(self, column_bytes: int) -> int:
        """Compute the number of pipeline stages, at most `stages`, that fit into shared memory.

        A tile has `column_bytes` bytes per column of a row.
        """
        tile_bytes = self.rows * self.chunks * self.block_n * column_bytes * self.programs_per_sm
        return fit_stages(self.stages, tile_bytes) if self.stages > 1 else 1

    def make_options(self, cols: int) -> dict[str, object]:
        """Make the constexprs for this configuration's tile, and the number of warps, for rows of `cols` columns.

        The forward kernel and that of a chain of LayerNorms have them in common.
        """
        return {
            "ROWS": self.rows,
            "CHUNKS": self.chunks,
            "BLOCK_N": self.block_n,
            "FULL": min(cols // self.block_n, self.chunks),
            "num_warps": self.num_warps,
        }


def plan_tile_forward(call: LayerNormForwardCall, config: LayerNormForwardTile) -> list[Launch]:
    """Plan the launch of a pass over rows that fit a tile."""
    layout = call.make_head_layout() if call.y_scale is None else call.make_float8_layout()
    ahead = None
    if call.y_scale is not None and config.rows == 1 and can_prefetch(layout.vec, call.x, call.residual):
        ahead = TILE_AHEAD_PER_SM * call.multiprocessors
    column_bytes = sum(tensor.element_size() for tensor in call.strided_inputs if tensor is not None)
    most = max(1, call.compute_max_programs(config.programs_per_sm)) if config.stages > 1 else sys.maxsize
    options = {
        **config.make_options(call.cols),
        "STAGES": config.compute_stages(column_bytes),
        "HEADS": layout.heads,
        "IS_RMS": call.options.is_rms,
        **call.make_common_constexprs(layout.vec),
    }
    is_light = call.is_plain and not call.is_modulated and layout.vec > 1 and config.chunks <= _MOST_LIGHT_CHUNKS
    if call.y_scale is not None and config.rows == 1 and is_light:
        options["maxnreg"] = _FLOAT8_REGISTERS
    leading = (*call.tensors, call.y_scale, *call.modulation_arguments(layout.vec), ahead)
    arguments = (*leading, call.rows, *layout.sizes, call.options.eps, *call.options.epilogue_arguments)
    by_rows = RowDependence(config.rows, most, rows_index=len(leading)) if call.x.ndim == 2 else None
    grid = call.make_grid(min(cdiv(call.rows, config.rows), most))
    return [Launch(layer_norm_forward_tile_kernel, grid, arguments, options, by_rows)]


@triton.jit(
    do_not_specialize=[
        "samples",
        "modulation_units",
        "ahead",
        "rows",
        "col_units",
        "x_row_units",
        "residual_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_forward_tile_kernel(
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
    rows: tl.int64,
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
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of tiles of ROWS complete rows: of one tile per program, or with STAGES > 1 of many.

    A tile is read once and held in registers, as CHUNKS blocks of BLOCK_N columns, the first FULL of which need no
    mask.  Several blocks waste no lanes for row lengths like 5 * 1024.  With a y_scale, y is float8: tiles are
    larger, so parameters are loaded late, and unless `ahead` is None (ROWS is 1) a program prefetches the row of
    the program `ahead` programs later into L2.
    """
    cols = col_units * VEC
    program, programs, head, heads = locate_program_among_heads(samples, HEADS)
    own = compute_parameter_offset(head, cols, HEADS)
    modulation = compute_modulation_offset(head, modulation_units, VEC, HEADS)
    weights = ()
    biases = ()
    scales = ()
    shifts = ()
    gates = ()
    if scale_ptr is not None:
        scale_ptr += modulation
    if shift_ptr is not None:
        shift_ptr += modulation
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        col_mask = make_column_mask(col, cols, i < FULL)
        gates = gates + load_gate(gate_ptr, modulation + col, col_mask)
        if y_scale_ptr is None:
            if weight_ptr is not None:
                weights = weights + (tl.load(weight_ptr + own + col, mask=col_mask, other=0.0),)
            if bias_ptr is not None:
                biases = biases + (tl.load(bias_ptr + own + col, mask=col_mask, other=0.0),)
            if scale_ptr is not None:
                scales = scales + (tl.load(scale_ptr + col, mask=col_mask, other=0.0),)
            if shift_ptr is not None:
                shifts = shifts + (tl.load(shift_ptr + col, mask=col_mask, other=0.0),)

    if STAGES == 1:
        _write_tile(
            program.to(tl.int64), rows, head, heads,
            x_ptr, residual_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
            y_ptr, residual_out_ptr, mean_ptr, rstd_ptr, y_scale_ptr, weights, biases, scales, shifts, gates,
            ahead, cols, x_row_units * VEC, residual_row_units * VEC,
            eps, seed, dropout_threshold, dropout_scale, negative_slope,
            FULL, ROWS, CHUNKS, BLOCK_N, IS_RMS, WEIGHT_OFFSET, HEADS, ACTIVATION, DROPOUT,
        )  # fmt: skip
    else:
        for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
            _write_tile(
                tile, rows, head, heads, x_ptr, residual_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
                y_ptr, residual_out_ptr, mean_ptr, rstd_ptr, y_scale_ptr, weights, biases, scales, shifts, gates,
                ahead, cols, x_row_units * VEC, residual_row_units * VEC,
                eps, seed, dropout_threshold, dropout_scale, negative_slope,
                FULL, ROWS, CHUNKS, BLOCK_N, IS_RMS, WEIGHT_OFFSET, HEADS, ACTIVATION, DROPOUT,
            )  # fmt: skip


@triton.jit
def _write_tile(
    tile, rows, head, heads, x_ptr, residual_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    y_ptr, residual_out_ptr, mean_ptr, rstd_ptr, y_scale_ptr, weights, biases, scales, shifts, gates,
    ahead, cols, x_row_stride, residual_row_stride, eps, seed, dropout_threshold, dropout_scale, negative_slope,
    FULL: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, HEADS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Load one tile of rows, and write its y, residual_out and statistics.

    `weights`, `biases`, `scales`, `shifts` and `gates` are the blocks of the parameters, empty for those that are
    None.  With a y_scale all but the last are empty, too, and loaded here.
    """
    n = cols.to(tl.float32)
    token = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    row_mask = token < rows
    row = compute_row_index(token, head, rows, heads, HEADS)
    x_row = compute_row_offset(token, row, head, x_row_stride, cols, HEADS)
    residual_row = compute_row_offset(token, row, head, residual_row_stride, cols, HEADS)
    columns, col_masks, chunks = load_tile(
        x_ptr, residual_ptr, gates, x_row, residual_row, row_mask, cols, FULL, BLOCK_N, CHUNKS
    )
    if ahead is not None:
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_stride, residual_row_stride, cols)
    pivot, shift, square = compute_tile_moments(chunks, col_masks, n, FULL, IS_RMS)
    rstd = approximate_rsqrt(square / n + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, pivot, shift, rstd, row_mask)

    values = ()
    largest = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for i in tl.static_range(CHUNKS):
        mask = row_mask & col_masks[i]
        y_at = row * cols.to(tl.int64) + columns[i]
        if residual_out_ptr is not None:
            residual_out = chunks[i].to(residual_out_ptr.dtype.element_ty)
            tl.store(residual_out_ptr + y_at, residual_out, mask=mask)
        if IS_RMS:
            y = chunks[i] * rstd
        else:
            y = (chunks[i] - pivot) * rstd - shift * rstd
        if weight_ptr is not None:
            if y_scale_ptr is None:
                weight = weights[i]
            else:
                weight = tl.load(weight_ptr + columns[i], mask=col_masks[i], other=0.0)
            y = y * add_weight_offset(widen(weight), WEIGHT_OFFSET)
        if bias_ptr is not None:
            if y_scale_ptr is None:
                bias = biases[i]
            else:
                bias = tl.load(bias_ptr + columns[i], mask=col_masks[i], other=0.0)
            y = y + widen(bias)
        if scale_ptr is not None:
            if y_scale_ptr is None:
                scale = scales[i]
            else:
                scale = tl.load(scale_ptr + columns[i], mask=col_masks[i], other=0.0)
            y = y * add_one(widen(scale))
        if shift_ptr is not None:
            if y_scale_ptr is None:
                offset = shifts[i]
            else:
                offset = tl.load(shift_ptr + columns[i], mask=col_masks[i], other=0.0)
            y = y + widen(offset)
        y = apply_epilogue(
            y,
            row,
            i * BLOCK_N,
            seed,
            dropout_threshold,
            dropout_scale,
            negative_slope,
            ACTIVATION,
            DROPOUT,
        )
        if y_scale_ptr is None:
            tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            largest = tl.maximum(
                largest, compute_magnitude(y, col_masks[i], i < FULL), propagate_nan=tl.PropagateNan.ALL
            )
            values = values + (y,)
    if y_scale_ptr is not None:
        y_scale = compute_float8_scale(reduce_maximum(largest, 1))
        tl.store(y_scale_ptr + row, y_scale, mask=row_mask)
        inverse = 1.0 / y_scale
        for i in tl.static_range(CHUNKS):
            y = (values[i] * inverse).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * cols.to(tl.int64) + columns[i], y, mask=row_mask & col_masks[i])
