"""Forward pass of LayerNorm and RMSNorm for rows that are too long for cooperative programs.

The first kernel computes the moments of parts of rows, the second writes blocks of columns; no program waits for
another.  The second kernel is launched while the first runs (programmatic dependent launch, compute capability
9.0): it loads its parameters before the moments are complete, and then reads x from L2 as far as L2 still holds it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.loads import add_residual_chunk
from fusednorm.jit.moments import store_row_statistics
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.register_fragments import (
    compute_lane_moments,
    load_fragment,
    merge_sets,
    reduce_lane_moments,
    store_normalised_chunk,
    store_residual_sum,
)
from fusednorm.launch.launches import (
    Launch,
    can_prefetch,
    count_full_range_chunks,
    has_one_lane_per_thread,
    make_early_options,
)
from fusednorm.launch.workspaces import get_counters
from fusednorm.ops.layer_norm.call import LayerNormForwardCall

MAX_PARTS = 1024
"""The largest number of parts of a row; one program merges their moments."""

PARTS_PROGRAMS, MAX_PARTS_A_PROGRAM = 2048, 8
"""The target number of programs over parts, a few times those that are resident, and the most parts per program."""

MOMENTS = tl.constexpr(4)
"""float32 numbers of a part or row: mean, shift, sum of squares or rstd, and one unused number: 16 bytes in all."""


@dataclass(frozen=True, slots=True)
class LayerNormForwardSplit:
    """A configuration in which no program waits for another.  One kernel computes moments of parts of rows,
    then another kernel writes y.

    A part has the fewest fragments of `chunks` chunks for which a row has at most MAX_PARTS parts.  For y, a
    program has a range of `apply_chunks` chunks of up to `rows` rows.  A chunk is 8 columns per thread; each
    kernel has its own number of warps.
    """

    chunks: int
    num_warps: int
    apply_chunks: int
    apply_num_warps: int
    rows: int

    @property
    def block_n(self) -> int:
        """Columns of a chunk of a part."""
        return 256 * self.num_warps

    @property
    def apply_chunk_cols(self) -> int:
        """Columns of a chunk of a range."""
        return 256 * self.apply_num_warps


def count_parts_per_program(parts: int) -> int:
    """Return the number of parts per program for `parts` parts of all rows; it does not change a row's bits."""
    return max(1, min(MAX_PARTS_A_PROGRAM, parts // PARTS_PROGRAMS))


def plan_split_forward(call: LayerNormForwardCall, config: LayerNormForwardSplit) -> list[Launch]:
    """Plan the launch for the moments of rows of any length, and the launch for y.

    If only statistics are wanted, there is only the first launch.
    """
    y, residual_out, mean, rstd = call.outputs
    x, residual, rows, cols = call.x, call.residual, call.rows, call.cols
    layout = call.make_row_layout()
    options = {
        "GROUP": 16 // call.itemsize,
        "IS_RMS": call.options.is_rms,
        **call.make_common_constexprs(layout.vec),
    }
    early = y is not None and call.can_start_early
    prefetches = can_prefetch(layout.vec, x, residual)
    lane_a_thread = has_one_lane_per_thread(min(16, layout.vec * call.itemsize), x, residual)

    fragment_cols = config.chunks * config.block_n
    part = fragment_cols * cdiv(cols, fragment_cols * MAX_PARTS)
    parts = cdiv(cols, part)
    slots = next_power_of_2(parts)
    of_a_program = count_parts_per_program(rows * parts)
    of_parts = new_workspace(x, rows, parts, 4)
    of_rows = None if y is None else new_workspace(x, rows, 4)
    statistics = Launch(
        layer_norm_forward_split_stats_kernel,
        (rows * cdiv(parts, of_a_program),),
        (
            x, residual, mean, rstd, of_rows, of_parts, get_counters(x.device, rows),
            parts, of_a_program, part // layout.vec, *layout.sizes, call.options.eps,
        ),
        {
            "FULL": count_full_range_chunks(cols, config.block_n, config.chunks, lane_a_thread),
            "EQUAL_PARTS": cols == part * slots and slots <= 32 * config.num_warps,
            "BLOCK_N": config.block_n,
            "CHUNKS": config.chunks,
            "SLOTS": slots,
            "PREFETCH": prefetches,
            "EARLY": early,
            "num_warps": config.num_warps,
            **{name: options[name] for name in ("VEC", "GROUP", "IS_RMS")},
        },
    )  # fmt: skip
    if y is None:
        return [statistics]

    range_length = config.apply_chunks * config.apply_chunk_cols
    row_tiles = cdiv(rows, config.rows)
    return [
        statistics,
        Launch(
            layer_norm_forward_split_apply_kernel,
            (cdiv(cols, range_length) * row_tiles,),
            (
                x, residual, call.weight, call.bias, y, residual_out, of_rows, rows, row_tiles, *layout.sizes,
                *call.options.epilogue_arguments,
            ),
            {
                "FULL": 0 if cols % range_length else config.apply_chunks,
                "BLOCK_N": config.apply_chunk_cols,
                "CHUNKS": config.apply_chunks,
                "ROWS": config.rows,
                "PREFETCH": prefetches,
                "num_warps": config.apply_num_warps,
                **options,
                **make_early_options(early),
            },
        ),
    ]  # fmt: skip


@triton.jit
def _store_moments(ptr, mean, shift, third):
    """Store mean, shift and a third value at `ptr` as three adjacent float32 values.

    The third value is the sum of squared deviations of a part, or the rstd of a row.
    """
    tl.store(ptr, mean)
    tl.store(ptr + 1, shift)
    tl.store(ptr + 2, third)


@triton.jit(
    do_not_specialize=["parts", "parts_a_program", "part_units", "col_units", "x_row_units", "residual_row_units"]
)  # fmt: skip
def layer_norm_forward_split_stats_kernel(
    x_ptr, residual_ptr, mean_ptr, rstd_ptr, moments_ptr, parts_ptr, counters_ptr, parts, parts_a_program,
    part_units, col_units, x_row_units: tl.int64, residual_row_units: tl.int64, eps: tl.float32,
    VEC: tl.constexpr, FULL: tl.constexpr, EQUAL_PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
    IS_RMS: tl.constexpr,
):  # fmt: skip
    """Write the moments of parts of rows to `parts_ptr`, [rows, parts, 4], and the statistics of complete rows.

    A part is processed in fragments of CHUNKS * BLOCK_N columns.

    The last program of a row to finish merges the moments in the order of the parts, writes the result to
    `moments_ptr` [rows, 4] and to mean and rstd, each unless it is None, and resets the row's counter to 0.
    """
    allow_next_launch(EARLY)
    cols = col_units * VEC
    part_cols = part_units * VEC
    fragment_cols: tl.constexpr = CHUNKS * BLOCK_N
    lanes: tl.constexpr = BLOCK_N // GROUP
    programs = tl.cdiv(parts, parts_a_program)
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_part = tl.program_id(0) % programs * parts_a_program
    end_part = tl.minimum(first_part + parts_a_program, parts)
    x_row = row * (x_row_units * VEC)
    residual_row = row * (residual_row_units * VEC)
    row_parts_ptr = parts_ptr + row * parts * MOMENTS

    for part in range(first_part, end_part):
        first_col = part * part_cols
        own_cols = tl.minimum(cols - first_col, part_cols)
        last = (tl.cdiv(own_cols, fragment_cols) - 1) * fragment_cols
        x_at = x_row + first_col
        residual_at = residual_row + first_col
        if PREFETCH and part + 1 < end_part:
            next_cols = tl.minimum(cols - first_col - part_cols, part_cols)
            prefetch(x_ptr + x_at + part_cols, next_cols)
            if residual_ptr is not None:
                prefetch(residual_ptr + residual_at + part_cols, next_cols)
        count = tl.zeros((lanes, 1), tl.float32)
        means = tl.zeros((lanes, 1), tl.float32)
        shifts = tl.zeros((lanes, 1), tl.float32)
        squares = tl.zeros((lanes, 1), tl.float32)
        for at in range(0, last, fragment_cols):
            of_fragment = compute_lane_moments(
                load_fragment(x_ptr, x_at + at, fragment_cols, CHUNKS, BLOCK_N, CHUNKS, GROUP, "evict_last"),
                load_fragment(
                    residual_ptr, residual_at + at, fragment_cols, CHUNKS, BLOCK_N, CHUNKS, GROUP, "evict_last"
                ),
                fragment_cols, CHUNKS, BLOCK_N, GROUP, IS_RMS,
            )  # fmt: skip
            count, means, shifts, squares = merge_sets(
                count, means, shifts, squares, of_fragment[0], of_fragment[1], of_fragment[2], of_fragment[3]
            )
        left = own_cols - last
        of_fragment = compute_lane_moments(
            load_fragment(x_ptr, x_at + last, left, FULL, BLOCK_N, CHUNKS, GROUP, "evict_last"),
            load_fragment(residual_ptr, residual_at + last, left, FULL, BLOCK_N, CHUNKS, GROUP, "evict_last"),
            left, FULL, BLOCK_N, GROUP, IS_RMS,
        )  # fmt: skip
        count, means, shifts, squares = merge_sets(
            count, means, shifts, squares, of_fragment[0], of_fragment[1], of_fragment[2], of_fragment[3]
        )
        part_mean, part_shift, part_square = reduce_lane_moments(count, means, shifts, squares, FULL == CHUNKS)
        _store_moments(row_parts_ptr + part * MOMENTS, part_mean, part_shift, part_square)
    tl.debug_barrier()

    own_parts = (end_part - first_part).to(tl.int64)
    if tl.atomic_add(counters_ptr + row, own_parts, sem="acq_rel") + own_parts == parts:
        tl.store(counters_ptr + row, 0)
        slot = tl.arange(0, SLOTS)
        present = slot < parts
        slot_ptrs = row_parts_ptr + slot * MOMENTS
        # Bypass L1, which may hold values from before the other programs' writes.
        part_means = tl.load(slot_ptrs, mask=present, other=0.0, cache_modifier=".cg")
        part_shifts = tl.load(slot_ptrs + 1, mask=present, other=0.0, cache_modifier=".cg")
        part_squares = tl.load(slot_ptrs + 2, mask=present, other=0.0, cache_modifier=".cg")
        if IS_RMS:
            mean = 0.0
            shift = 0.0
            square = tl.sum(part_squares)
        else:
            # In 64 bits: slots past the last part would start past 2^31.
            counts = tl.minimum(tl.maximum(cols - slot.to(tl.int64) * part_cols, 0), part_cols).to(tl.float32)
            mean, shift, square = reduce_lane_moments(
                tl.expand_dims(counts, 1),
                tl.expand_dims(part_means, 1),
                tl.expand_dims(part_shifts, 1),
                tl.expand_dims(part_squares, 1),
                EQUAL_PARTS,
            )
        rstd = approximate_rsqrt(square / cols.to(tl.float32) + eps)
        if moments_ptr is not None:
            _store_moments(moments_ptr + row * MOMENTS, mean, shift, rstd)
        store_row_statistics(mean_ptr, rstd_ptr, row, mean, shift, rstd, None)


@triton.jit(
    do_not_specialize=[
        "rows", "row_tiles", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"
    ]
)  # fmt: skip
def layer_norm_forward_split_apply_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, moments_ptr, rows: tl.int64, row_tiles,
    col_units, x_row_units: tl.int64, residual_row_units: tl.int64, seed: tl.int64, dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write y.  Each program handles a range of CHUNKS * BLOCK_N columns, in up to ROWS rows.

    `moments_ptr`, [rows, 4], has mean, shift and rstd of each row; the row's mean is mean + shift.  The last
    ranges are processed first: L2 still holds most of them.
    """
    cols = col_units * VEC
    range_length: tl.constexpr = CHUNKS * BLOCK_N
    first_col = (tl.cdiv(cols, range_length) - 1 - tl.program_id(0) // row_tiles) * range_length
    range_cols = tl.minimum(cols - first_col, range_length)
    first_row = (tl.program_id(0) % row_tiles).to(tl.int64) * ROWS
    weights = load_fragment(weight_ptr, first_col, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    biases = load_fragment(bias_ptr, first_col, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    await_previous_launch(EARLY)
    end_row = tl.minimum(rows, first_row + ROWS)
    for row in range(first_row, end_row):
        if PREFETCH and row + 1 < end_row:
            prefetch(x_ptr + (row + 1) * (x_row_units * VEC) + first_col, range_cols)
            if residual_ptr is not None:
                prefetch(residual_ptr + (row + 1) * (residual_row_units * VEC) + first_col, range_cols)
        x_at = row * (x_row_units * VEC) + first_col
        residual_at = row * (residual_row_units * VEC) + first_col
        y_at = row * cols.to(tl.int64) + first_col
        chunks = load_fragment(x_ptr, x_at, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "evict_first")
        residuals = load_fragment(
            residual_ptr, residual_at, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "evict_first"
        )
        store_residual_sum(chunks, residuals, residual_out_ptr, y_at, range_cols, FULL, BLOCK_N, GROUP)
        mean = tl.load(moments_ptr + row * MOMENTS)
        shift = tl.load(moments_ptr + row * MOMENTS + 1)
        rstd = tl.load(moments_ptr + row * MOMENTS + 2)
        for i in tl.static_range(CHUNKS):
            store_normalised_chunk(
                add_residual_chunk(chunks, residuals, i), weights[i : i + 1], biases[i : i + 1], (), (), i,
                y_ptr, y_at, range_cols, row, first_col,
                mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
                FULL, BLOCK_N, GROUP, "evict_first", WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT,
            )  # fmt: skip
