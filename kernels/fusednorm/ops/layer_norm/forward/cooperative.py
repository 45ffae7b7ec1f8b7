"""Forward pass of LayerNorm and RMSNorm in which several programs share a row."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.loads import add_residual_chunk, make_unaligned_zero
from fusednorm.jit.moments import store_row_statistics
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.program_exchange import collect_slots, end_exchange, load_first_tag, locate_slot, post_scalars
from fusednorm.jit.register_fragments import (
    compute_fragment_moments,
    load_fragment,
    merge_equal_sets,
    merge_sets,
    store_normalised_chunk,
    store_residual_sum,
)
from fusednorm.launch.launches import Launch, can_prefetch, count_full_range_chunks, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.layer_norm.call import LayerNormForwardCall


@dataclass(frozen=True, slots=True)
class LayerNormForwardCooperative:
    """A configuration in which several resident programs share a row and exchange its moments.

    Each program has a range of `chunks` chunks, with 8 columns per thread in a chunk.  `programs_per_sm`
    programs are resident on a multiprocessor.  A program reads a range again `lag` rows after it posted the
    range's moments, and prefetches the range `ahead` rows later into L2.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def block_n(self) -> int:
        """Columns of a chunk."""
        return 256 * self.num_warps

    @property
    def range_cols(self) -> int:
        """Columns of a program."""
        return self.chunks * self.block_n


def plan_cooperative_forward(call: LayerNormForwardCall, config: LayerNormForwardCooperative) -> list[Launch]:
    """Plan the one cooperative launch of a pass over rows that several programs share.

    A row must fit the ranges of all programs that are resident on the device.
    """
    layout = call.make_row_layout()
    members = cdiv(call.cols, config.range_cols)
    resident = call.multiprocessors * config.programs_per_sm
    programs = min(call.rows, resident // members) * members
    slots = next_power_of_2(members)
    depth = next_power_of_2(2 * config.lag)
    access, tensors = call.make_access_options(layout.vec), call.tensors
    merges_as_equals = call.can_merge_equal_sets(layout.vec, access, tensors)
    options = {
        "FULL": count_full_range_chunks(call.cols, config.block_n, config.chunks, merges_as_equals),
        # Each member is one lane of a reduction; EQUAL_RANGES: whether all lanes have equal weight.
        "EQUAL_RANGES": call.cols == config.range_cols * slots and slots <= 32 * config.num_warps,
        "SLOTS": slots,
        "BLOCK_N": config.block_n,
        "CHUNKS": config.chunks,
        **access,
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead if can_prefetch(layout.vec, call.x, call.residual) else 0,
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        **call.make_common_constexprs(layout.vec),
        **make_cooperative_options(config),
    }
    buffer = get_exchange_buffer(call.x.device, depth * programs)
    scalars = (call.rows, members, *layout.sizes, call.options.eps, *call.options.epilogue_arguments)
    arguments = (*tensors, buffer, *scalars)
    return [Launch(layer_norm_forward_cooperative_kernel, (programs,), arguments, options)]


@triton.jit
def _collect_row_moments(
    exchange_ptr, team, tag, members, member, count, cols, eps,
    DEPTH: tl.constexpr, EQUAL_RANGES: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Wait for the moments of all programs that share a row.  Merge them into the row's mean, in two parts
    (mean + shift), and its rstd.

    The results are scalars.  `member` [slots] is the index of each program (member); `count` [slots] is its
    number of columns, 0 after the last member.  `team` is the index of this set of programs.
    """
    present = member < members
    slot_ptrs = locate_slot(exchange_ptr, team, tag, tl.where(present, member, 0), members, DEPTH)
    means, shifts, squares = collect_slots(slot_ptrs, tag)
    if IS_RMS:
        mean = 0.0
        shift = 0.0
        square = tl.sum(tl.where(present, squares, 0.0))
    elif EQUAL_RANGES:
        _, mean, shift, square = tl.reduce((count, means, shifts, squares), 0, merge_equal_sets)
    else:
        _, mean, shift, square = tl.reduce((count, means, shifts, tl.where(present, squares, 0.0)), 0, merge_sets)
    return mean, shift, approximate_rsqrt(square / cols.to(tl.float32) + eps)


@triton.jit(
    do_not_specialize=[
        "rows", "members", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"
    ]
)  # fmt: skip
def layer_norm_forward_cooperative_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    exchange_ptr,
    rows: tl.int64,
    members,
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
    EQUAL_RANGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    NARROW: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y.  `members` programs share each row, and each of them has a range of CHUNKS * BLOCK_N columns.

    A program reads every range twice.  The first read is for the moments, which it posts, and the sum with a
    residual, which it writes.  The second is LAG rows later, when the other members have posted their
    moments, out of L1 or L2, for y.  Parameters stay in registers.  Programs are persistent; the launch must
    be cooperative.
    """
    cols = col_units * VEC
    range_length: tl.constexpr = CHUNKS * BLOCK_N
    group = tl.program_id(0) // members
    groups = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    first_col = member * range_length
    range_cols = tl.minimum(cols - first_col, range_length)
    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(rows, groups).to(tl.uint32) - 1
    turns = tl.cdiv(rows - group, groups)
    other = tl.arange(0, SLOTS)
    count_of_other = tl.minimum(tl.maximum(cols - other * range_length, 0), range_length).to(tl.float32)
    x_row_size = x_row_units * VEC
    residual_row_size = residual_row_units * VEC
    own = first_col + make_unaligned_zero(cols, NARROW)
    weights = load_fragment(weight_ptr, own, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    biases = load_fragment(bias_ptr, own, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, "")
    # A sum that is written in float32 is exact, so the second read takes it instead of x and residual.
    EXACT_SUM: tl.constexpr = residual_out_ptr is not None and residual_out_ptr.dtype.element_ty == tl.float32
    KEEP: tl.constexpr = "" if NARROW else "evict_last"
    DROP: tl.constexpr = "" if NARROW else "evict_first"

    tag = start
    for turn in range(0, turns + LAG):
        # The row whose moments are computed; after the last iteration, the last row again, without use.
        row = group + tl.minimum(turn, turns - 1) * groups
        x_at = row * x_row_size + first_col
        chunks = load_fragment(x_ptr, x_at, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, KEEP)
        residual_at = row * residual_row_size + first_col
        residuals = load_fragment(residual_ptr, residual_at, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, KEEP)
        if AHEAD > 0 and turn + AHEAD < turns:
            prefetch(x_ptr + x_at + AHEAD * groups * x_row_size, range_cols)
            if residual_ptr is not None:
                prefetch(residual_ptr + residual_at + AHEAD * groups * residual_row_size, range_cols)

        if turn >= LAG:
            late_row = group + (turn - LAG) * groups
            late_y = late_row * cols.to(tl.int64) + first_col
            if y_ptr is not None:
                if EXACT_SUM:
                    late = load_fragment(residual_out_ptr, late_y, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, DROP)
                    late_residuals = ()
                else:
                    late_x = late_row * x_row_size + first_col
                    late_residual = late_row * residual_row_size + first_col
                    late = load_fragment(x_ptr, late_x, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, DROP)
                    late_residuals = load_fragment(
                        residual_ptr, late_residual, range_cols, FULL, BLOCK_N, CHUNKS, GROUP, DROP
                    )
            mean, shift, rstd = _collect_row_moments(
                exchange_ptr, group, tag - LAG, members, other, count_of_other,
                cols, eps, DEPTH, EQUAL_RANGES, IS_RMS,
            )  # fmt: skip
            if member == 0:
                store_row_statistics(mean_ptr, rstd_ptr, late_row, mean, shift, rstd, None)
            if y_ptr is not None:
                for i in tl.static_range(CHUNKS):
                    store_normalised_chunk(
                        add_residual_chunk(late, late_residuals, i), weights[i : i + 1], biases[i : i + 1], (), (),
                        i, y_ptr, late_y, range_cols,
                        late_row, first_col,
                        mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
                        FULL, BLOCK_N, GROUP, DROP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT,
                    )  # fmt: skip

        if turn < turns:
            sums_at = row * cols.to(tl.int64) + first_col
            store_residual_sum(chunks, residuals, residual_out_ptr, sums_at, range_cols, FULL, BLOCK_N, GROUP)
            range_mean, range_shift, range_square = compute_fragment_moments(
                chunks, residuals, range_cols, FULL, BLOCK_N, GROUP, NARROW, IS_RMS
            )
            slot = locate_slot(exchange_ptr, group, tag, member, members, DEPTH)
            post_scalars(slot, tag, range_mean, range_shift, range_square)
        tag += 1

    end_exchange(exchange_ptr, last_tag)
