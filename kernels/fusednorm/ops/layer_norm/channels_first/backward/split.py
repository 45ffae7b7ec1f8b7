"""Backward pass over more channels than a program holds: two kernels, which read x and dy twice.

The first computes the two sums over the channels of each position; the second processes blocks of channels.  The
formulas are in `fusednorm.ops.layer_norm.backward.tile`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import new_workspace
from fusednorm.integers import cdiv
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import load_masked, make_column_mask, widen
from fusednorm.jit.reductions import sum_pair
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm.backward.partial_reduction import PartialGradients, plan_partial_reduction
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.channels_first.channel_blocks import (
    SUMMED_BLOCKS,
    load_channel_block,
    load_factor_and_addend,
)
from fusednorm.ops.layer_norm.channels_first.position_tiles import (
    PositionTiles,
    backpropagate_channel_epilogue,
    divide_tiles,
    list_modulation_arguments,
    locate_tile,
    sum_adjacent_positions,
)
from fusednorm.ops.layer_norm.gradient_steps import store_input_gradients


@dataclass(frozen=True, slots=True)
class ChannelsFirstBackwardSplit:
    """A configuration in which a program processes `block_p` positions at a time.

    Programs of the first kernel process all channels of these, programs of the second one block of channels.
    """

    block_p: int
    num_warps: int
    programs_per_sm: int


def plan_channels_split_backward(call: LayerNormBackwardCall, config: ChannelsFirstBackwardSplit) -> list[Launch]:
    """Plan the launches for the sums of each position, dx and partial sums, and parameter gradients.

    The call has its statistics.
    """
    tiles = PositionTiles.of_call(call, config.block_p, *call.strided_inputs, *call.input_gradients)
    block_c = tiles.compute_block_c(config.num_warps)
    blocks = cdiv(tiles.channels, block_c)
    resident = max(1, call.multiprocessors * config.programs_per_sm // blocks)
    shares, programs = tiles.divide_among_programs(resident, call.is_modulated)
    partials = PartialGradients.allocate(call, programs)
    sums = new_workspace(call.x, 2, tiles.samples * tiles.positions)
    options = {
        **tiles.make_block_options(block_c),
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        **call.make_epilogue_constexprs(),
    }
    inputs = (call.weight, call.bias, *list_modulation_arguments(call), call.mean, call.rstd, sums)
    scalars = (tiles.samples, *tiles.sizes, *call.options.epilogue_arguments)
    gradients = (*call.input_gradients, partials.dweight, partials.dbias, partials.dgate)
    apply_options = {
        **options,
        "GROUP": tiles.group,
        "MODULATED": call.is_modulated,
        "EARLY_REDUCE": call.can_reduce_early,
    }
    grids = (tiles.samples * tiles.tiles_per_sample,), (blocks * programs * shares,)
    return [
        Launch(
            layer_norm_backward_channels_first_split_sums_kernel,
            grids[0],
            (call.dy, call.x, call.residual, *inputs, *scalars),
            options,
        ),
        Launch(
            layer_norm_backward_channels_first_split_apply_kernel,
            grids[1],
            (*call.strided_inputs, *inputs, *gradients, *scalars),
            apply_options,
        ),
        *plan_partial_reduction(call, partials, resident),
    ]


@triton.jit
def _compute_x_hat_and_dz(
    h, dy, mean, rstd, factor, addend, row, first_channel, seed, dropout_threshold, dropout_scale, negative_slope,
    IS_RMS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute x_hat and dz of a block of channels, [BLOCK_C, BLOCK_P]."""
    if IS_RMS:
        x_hat = h * rstd
    else:
        x_hat = (h - mean) * rstd
    dz = backpropagate_channel_epilogue(
        dy, x_hat, factor, addend, row, first_channel, seed, dropout_threshold, dropout_scale, negative_slope,
        ACTIVATION, DROPOUT,
    )  # fmt: skip
    return x_hat, dz


@triton.jit
def _load_statistics(mean_ptr, rstd_ptr, row, mask, IS_RMS: tl.constexpr):
    """Load mean and rstd of positions; the mean is 0 for RMSNorm."""
    rstd = tl.load(rstd_ptr + row, mask=mask, other=0.0)
    mean = tl.zeros_like(rstd)
    if not IS_RMS:
        mean = tl.load(mean_ptr + row, mask=mask, other=0.0)
    return mean, rstd


@triton.jit(
    do_not_specialize=["modulation_stride", "samples", "channels", "position_units", "seed", "dropout_threshold"]
)
def layer_norm_backward_channels_first_split_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    modulation_stride: tl.int64,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    samples,
    channels,
    position_units,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    EVEN_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write the means of g * x_hat and of g over the channels of each position, [2, rows] float32.

    Each program has BLOCK_P positions.
    """
    positions = position_units * VEC
    inverse_n = 1.0 / channels.to(tl.float32)
    sample, first = locate_tile(tl.program_id(0), positions, BLOCK_P)
    position = first + tl.arange(0, BLOCK_P)[None, :]
    position_mask = make_column_mask(position, positions, EVEN_P)
    start = sample * channels * positions
    row = sample * positions + position
    modulation = sample * modulation_stride
    mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, position_mask, IS_RMS)
    products = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    blocks = tl.cdiv(channels, BLOCK_C)
    for first_block in range(0, blocks, SUMMED_BLOCKS):
        product_run = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        run = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        for block in range(first_block, tl.minimum(first_block + SUMMED_BLOCKS, blocks)):
            first_channel = block * BLOCK_C
            at, mask, _, h, _ = load_channel_block(
                x_ptr, residual_ptr, gate_ptr, start, modulation, first_channel, position, position_mask,
                channels, positions, BLOCK_C,
            )  # fmt: skip
            factor, addend = load_factor_and_addend(
                weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation, first_channel, channels,
                BLOCK_C, WEIGHT_OFFSET, ACTIVATION != "none",
            )  # fmt: skip
            x_hat, dz = _compute_x_hat_and_dz(
                h, load_masked(dy_ptr, at, mask, ""), mean, rstd, factor, addend, row, first_channel,
                seed, dropout_threshold, dropout_scale, negative_slope, IS_RMS, ACTIVATION, DROPOUT,
            )  # fmt: skip
            g = dz * factor
            product_run += tl.where(mask, g * x_hat, 0.0)
            if not IS_RMS:
                run += tl.where(mask, g, 0.0)
        products += product_run
        total += run
    c1, c2 = sum_pair(products, total, 0)
    tl.store(sums_ptr + row, c1 * inverse_n, mask=position_mask)
    if not IS_RMS:
        rows = samples * positions.to(tl.int64)
        tl.store(sums_ptr + rows + row, c2 * inverse_n, mask=position_mask)


@triton.jit(
    do_not_specialize=["modulation_stride", "samples", "channels", "position_units", "seed", "dropout_threshold"]
)
def layer_norm_backward_channels_first_split_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    gate_ptr,
    modulation_stride: tl.int64,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    dgate_partial_ptr,
    samples,
    channels,
    position_units,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MODULATED: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write dx, and partial sums for the parameters, of BLOCK_C channels per program over tiles of positions.

    `layer_norm_backward_channels_first_split_sums_kernel` wrote `sums_ptr`.  A program of a MODULATED call
    processes tiles of one sample.
    """
    allow_next_launch(EARLY_REDUCE)
    positions = position_units * VEC
    rows = samples * positions.to(tl.int64)
    blocks = tl.cdiv(channels, BLOCK_C)
    first_channel = (tl.program_id(0) % blocks) * BLOCK_C
    first_tile, last_tile, step, partial, own_sample = divide_tiles(
        tl.program_id(0) // blocks, tl.num_programs(0) // blocks, samples, tl.cdiv(positions, BLOCK_P), MODULATED
    )
    modulation = own_sample * modulation_stride
    factor, addend = load_factor_and_addend(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation, first_channel, channels,
        BLOCK_C, WEIGHT_OFFSET, ACTIVATION != "none",
    )  # fmt: skip
    dweight = tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32)
    dbias = tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32)
    dgate = tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32)
    for tile in tl.range(first_tile, last_tile, step):
        sample, first = locate_tile(tile, positions, BLOCK_P)
        position = first + tl.arange(0, BLOCK_P)[None, :]
        position_mask = make_column_mask(position, positions, EVEN_P)
        start = sample * channels * positions
        row = sample * positions + position
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, position_mask, IS_RMS)
        at, mask, x, h, gate = load_channel_block(
            x_ptr, residual_ptr, gate_ptr, start, modulation, first_channel, position, position_mask,
            channels, positions, BLOCK_C,
        )  # fmt: skip
        x_hat, dz = _compute_x_hat_and_dz(
            h, load_masked(dy_ptr, at, mask, ""), mean, rstd, factor, addend, row, first_channel,
            seed, dropout_threshold, dropout_scale, negative_slope, IS_RMS, ACTIVATION, DROPOUT,
        )  # fmt: skip
        if dweight_partial_ptr is not None:
            dweight += sum_adjacent_positions(dz * x_hat, GROUP)
        if dbias_partial_ptr is not None:
            dbias += sum_adjacent_positions(dz, GROUP)
        dh = dz * factor - x_hat * tl.load(sums_ptr + row, mask=position_mask, other=0.0)
        if not IS_RMS:
            dh -= tl.load(sums_ptr + rows + row, mask=position_mask, other=0.0)
        dh *= rstd
        if dresidual_out_ptr is not None:
            dh += load_masked(dresidual_out_ptr, at, mask, "")
        if dgate_partial_ptr is not None:
            dgate += sum_adjacent_positions(dh * widen(x), GROUP)
        store_input_gradients(dh, gate, dx_ptr, dresidual_ptr, 0, at, mask, "")
    channel = first_channel + tl.arange(0, BLOCK_C)[:, None]
    at = partial * channels + channel
    if dweight_partial_ptr is not None:
        tl.store(dweight_partial_ptr + at, tl.sum(dweight, 1, keep_dims=True), mask=channel < channels)
    if dbias_partial_ptr is not None:
        tl.store(dbias_partial_ptr + at, tl.sum(dbias, 1, keep_dims=True), mask=channel < channels)
    if dgate_partial_ptr is not None:
        tl.store(dgate_partial_ptr + at, tl.sum(dgate, 1, keep_dims=True), mask=channel < channels)
