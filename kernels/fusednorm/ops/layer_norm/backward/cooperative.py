"""Backward pass of LayerNorm and RMSNorm in which several programs share a row.

The formulas are in `backward.tile`; `backward.partial_reduction` adds up the partial sums.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import add_weight_offset, make_column_mask, make_unaligned_zero, widen
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.program_exchange import collect_slots, end_exchange, load_first_tag, locate_slot, post_scalars
from fusednorm.jit.reductions import sum_pair, sum_pair_to_scalars
from fusednorm.launch.launches import Launch, can_prefetch, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.layer_norm.backward.partial_reduction import PartialGradients, plan_partial_reduction
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.gradient_steps import (
    backpropagate_epilogue,
    load_unconverted_parameter,
    store_input_gradients,
)


@dataclass(frozen=True, slots=True)
class LayerNormBackwardCooperative:
    """A configuration in which several resident programs share a row and exchange its sums.

    Each program has a range of `block_n` columns.  `programs_per_sm` programs are resident on a
    multiprocessor.  A program reads a range again `lag` rows after it posted the range's sums, and
    prefetches the ranges `ahead` rows later into L2.
    """

    block_n: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int


def plan_cooperative_backward(call: LayerNormBackwardCall, config: LayerNormBackwardCooperative) -> list[Launch]:
    """Plan a launch whose programs share rows and compute dx and partial sums.  Another launch adds up the
    partial sums.

    The call must have mean and rstd.
    """
    layout = call.make_row_layout()
    members = cdiv(call.cols, config.block_n)
    most_groups = call.multiprocessors * config.programs_per_sm // members
    groups = min(call.rows, most_groups)
    is_direct = most_groups == 1
    partials = PartialGradients.from_results(call) if is_direct else PartialGradients.allocate(call, groups)
    depth = next_power_of_2(2 * config.lag)
    options = {
        "BLOCK_N": config.block_n,
        "EVEN": call.cols % config.block_n == 0,
        "SLOTS": next_power_of_2(members),
        "DEPTH": depth,
        "LAG": config.lag,
        "AHEAD": config.ahead if can_prefetch(layout.vec, call.x, call.dy) else 0,
        "EARLY_REDUCE": call.can_reduce_early,
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        **call.make_common_constexprs(layout.vec),
        **make_cooperative_options(config),
    }
    arguments = (
        *call.tensors, call.mean, call.rstd, *call.input_gradients, partials.dweight, partials.dbias,
        get_exchange_buffer(call.x.device, depth * groups * members), call.rows, members, *layout.sizes,
        *call.options.epilogue_arguments,
    )  # fmt: skip
    return [
        Launch(layer_norm_backward_cooperative_kernel, (groups * members,), arguments, options),
        *plan_partial_reduction(call, partials, most_groups),
    ]


@triton.jit
def _compute_centred_and_dz(
    x,
    residual,
    dy,
    mean,
    rstd,
    weight,
    bias,
    row,
    first_col,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Compute d = h - mean and dz for a loaded range of a row.  Here, dz is the gradient of the affine step's
    output.

    x, residual and dy are in the dtype of memory; x_hat is d * rstd.
    """
    d = widen(x)
    if HAS_RESIDUAL:
        d += widen(residual)
    d -= mean
    dz = backpropagate_epilogue(
        widen(dy),
        d * rstd,
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
    return d, dz


@triton.jit(
    do_not_specialize=[
        "rows",
        "members",
        "col_units",
        "dy_row_units",
        "x_row_units",
        "residual_row_units",
        "dresidual_out_row_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_backward_cooperative_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    exchange_ptr,
    rows: tl.int64,
    members,
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
    BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write dx, and partial sums for the parameter gradients.  `members` programs share each row.

    A member has BLOCK_N columns of the row.  Mean and rstd are inputs.  A program reads every range twice:
    first for the range's part of c1 and c2, which it posts, then LAG rows later, out of L1 or L2, for the
    gradients.  LAG leaves the other members time to post theirs.  Here, c1 and c2 are the row's means of g
    * x_hat and of g in the formula of dx.  Programs are persistent; the launch must be cooperative.
    Instructions limit its speed in 16 bits, so it uses d, not x_hat, where possible.
    """
    allow_next_launch(EARLY_REDUCE)
    cols = col_units * VEC
    inverse_n = 1.0 / cols.to(tl.float32)
    group = tl.program_id(0) // members
    groups = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    first_col = member * BLOCK_N
    lane = tl.arange(0, BLOCK_N)[None, :]
    mask = make_column_mask(first_col + lane, cols, EVEN)
    other = tl.arange(0, SLOTS)
    present = other < members
    NARROW: tl.constexpr = VEC * x_ptr.dtype.element_ty.primitive_bitwidth < 128
    KEEP: tl.constexpr = "" if NARROW else "evict_last"
    DROP: tl.constexpr = "" if NARROW else "evict_first"
    own = first_col + make_unaligned_zero(cols, NARROW) + lane
    weight_stored = load_unconverted_parameter(weight_ptr, own, mask, 1.0)
    bias_stored = load_unconverted_parameter(bias_ptr if ACTIVATION != "none" else None, own, mask, 0.0)
    if dweight_partial_ptr is not None:
        dweight = tl.zeros((1, BLOCK_N), tl.float32)
    if dbias_partial_ptr is not None:
        dbias = tl.zeros((1, BLOCK_N), tl.float32)

    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(rows, groups).to(tl.uint32) - 1
    turns = tl.cdiv(rows - group, groups)
    dy_ptr += first_col
    x_ptr += first_col

    tag = start
    for turn in range(0, turns + LAG):
        row = group + turn * groups
        ahead = make_column_mask(first_col + lane, cols, EVEN) & (turn < turns)
        x = tl.load(x_ptr + row * (x_row_units * VEC) + lane, mask=ahead, other=0.0, eviction_policy=KEEP)
        dy = tl.load(dy_ptr + row * (dy_row_units * VEC) + lane, mask=ahead, other=0.0, eviction_policy=KEEP)
        residual = x
        if residual_ptr is not None:
            residual = tl.load(
                residual_ptr + row * (residual_row_units * VEC) + first_col + lane,
                mask=ahead,
                other=0.0,
                eviction_policy=KEEP,
            )
        rstd = tl.load(rstd_ptr + row, mask=turn < turns, other=0.0)
        mean = 0.0
        if not IS_RMS:
            mean = tl.load(mean_ptr + row, mask=turn < turns, other=0.0)
        if AHEAD > 0 and turn + AHEAD < turns:
            ahead_row = row + AHEAD * groups
            prefetch(x_ptr + ahead_row * (x_row_units * VEC), tl.minimum(cols - first_col, BLOCK_N))
            prefetch(dy_ptr + ahead_row * (dy_row_units * VEC), tl.minimum(cols - first_col, BLOCK_N))

        if turn >= LAG:
            row_b = row - LAG * groups
            x_b = tl.load(x_ptr + row_b * (x_row_units * VEC) + lane, mask=mask, other=0.0, eviction_policy=DROP)
            dy_b = tl.load(dy_ptr + row_b * (dy_row_units * VEC) + lane, mask=mask, other=0.0, eviction_policy=DROP)
            residual_b = x_b
            if residual_ptr is not None:
                residual_b = tl.load(
                    residual_ptr + row_b * (residual_row_units * VEC) + first_col + lane,
                    mask=mask,
                    other=0.0,
                    eviction_policy=DROP,
                )
            rstd_b = tl.load(rstd_ptr + row_b)
            mean_b = 0.0
            if not IS_RMS:
                mean_b = tl.load(mean_ptr + row_b)
            late_tag = tag - LAG
            part_1, part_2, _ = collect_slots(
                locate_slot(exchange_ptr, group, late_tag, tl.where(present, other, 0), members, DEPTH), late_tag
            )
            c1, c2 = sum_pair_to_scalars(tl.where(present, part_1, 0.0), tl.where(present, part_2, 0.0))
            weight = add_weight_offset(widen(weight_stored), WEIGHT_OFFSET)
            bias = widen(bias_stored)
            d, dz = _compute_centred_and_dz(
                x_b, residual_b, dy_b, mean_b, rstd_b, weight, bias, row_b, first_col,
                seed, dropout_threshold, dropout_scale, negative_slope,
                ACTIVATION, DROPOUT, residual_ptr is not None,
            )  # fmt: skip
            scaled = dz * rstd_b
            if dweight_partial_ptr is not None:
                dweight += scaled * d
            if dbias_partial_ptr is not None:
                dbias += dz
            scale = -inverse_n * rstd_b
            dx = d * (c1 * scale * rstd_b)
            if not IS_RMS:
                dx += c2 * scale
            dx += scaled * weight
            if dresidual_out_ptr is not None:
                outside_at = row_b * (dresidual_out_row_units * VEC) + first_col + lane
                dx += tl.load(dresidual_out_ptr + outside_at, mask=mask, other=0.0).to(tl.float32)
            store_input_gradients(
                dx, (), dx_ptr, dresidual_ptr, row_b * cols.to(tl.int64), first_col + lane, mask, DROP
            )

        if turn < turns:
            weight = add_weight_offset(widen(weight_stored), WEIGHT_OFFSET)
            bias = widen(bias_stored)
            d, dz = _compute_centred_and_dz(
                x, residual, dy, mean, rstd, weight, bias, row, first_col,
                seed, dropout_threshold, dropout_scale, negative_slope,
                ACTIVATION, DROPOUT, residual_ptr is not None,
            )  # fmt: skip
            g = dz * weight
            if not EVEN:
                g = tl.where(mask, g, 0.0)
            c1, c2 = sum_pair(g * d, g, 1)
            c1 *= rstd
            post_scalars(
                locate_slot(exchange_ptr, group, tag, member, members, DEPTH), tag, tl.sum(c1), tl.sum(c2), 0.0
            )
        tag += 1

    end_exchange(exchange_ptr, last_tag)
    partial_at = group.to(tl.int64) * cols + first_col + lane
    if dweight_partial_ptr is not None:
        tl.store(dweight_partial_ptr + partial_at, dweight, mask=mask)
    if dbias_partial_ptr is not None:
        tl.store(dbias_partial_ptr + partial_at, dbias, mask=mask)
