"""Backward pass over channels, with all channels of a tile of positions in the registers of one program.

The formulas are in `fusednorm.ops.layer_norm.backward.tile`.  Each program's sums over positions for dweight,
dbias and dgate stay in float32 registers, one for each channel and each access of a thread, and
`fusednorm.ops.layer_norm.backward.partial_reduction` adds up those of all programs in fixed order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import make_column_mask, widen
from fusednorm.jit.reductions import sum_pair
from fusednorm.launch.launches import Launch, compute_max_registers
from fusednorm.ops.layer_norm.backward.partial_reduction import PartialGradients, plan_partial_reduction
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall
from fusednorm.ops.layer_norm.channels_first.position_tiles import (
    PositionTiles,
    backpropagate_channel_epilogue,
    compute_addend,
    compute_factor,
    compute_position_moments,
    compute_sum_chunk,
    divide_tiles,
    list_modulation_arguments,
    load_channel_chunks,
    load_channel_parameter,
    locate_tile,
    make_block_offsets,
    make_chunk_mask,
    select_gate,
    sum_adjacent_positions,
)
from fusednorm.ops.layer_norm.gradient_steps import store_input_gradients


@dataclass(frozen=True, slots=True)
class ChannelsFirstBackwardTile:
    """A configuration in which each persistent program holds all channels of `block_p` positions at a time."""

    block_p: int
    num_warps: int
    programs_per_sm: int


def plan_channels_tile_backward(call: LayerNormBackwardCall, config: ChannelsFirstBackwardTile) -> list[Launch]:
    """Plan the launch for dx and partial sums over tiles of positions, and the one for parameter gradients."""
    tiles = PositionTiles.of_call(call, config.block_p, *call.strided_inputs, *call.input_gradients)
    resident = call.multiprocessors * config.programs_per_sm
    shares, programs = tiles.divide_among_programs(resident, call.is_modulated)
    partials = PartialGradients.allocate(call, programs)
    options = {
        **tiles.make_channel_chunks(config.num_warps),
        "GROUP": tiles.group,
        "MODULATED": call.is_modulated,
        "EARLY_REDUCE": call.can_reduce_early,
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        "maxnreg": compute_max_registers(config),
        **call.make_epilogue_constexprs(),
    }
    arguments = (
        *call.tensors, *list_modulation_arguments(call), call.mean, call.rstd, *call.input_gradients,
        partials.dweight, partials.dbias, partials.dgate, tiles.samples, *tiles.sizes, call.options.eps,
        *call.options.epilogue_arguments,
    )  # fmt: skip
    return [
        Launch(layer_norm_backward_channels_first_tile_kernel, (programs * shares,), arguments, options),
        *plan_partial_reduction(call, partials, resident),
    ]


@triton.jit
def _compute_x_hat(
    chunks, residuals, gates, i: tl.constexpr, mean, shift, rstd, channels,
    FULL: tl.constexpr, HAS_SHIFT: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute chunk i of x_hat; 0 for channels that do not exist.

    The mean is mean + shift, where shift is 0 unless HAS_SHIFT.
    """
    x_hat = compute_sum_chunk(chunks, residuals, gates, i)
    if not IS_RMS:
        x_hat = x_hat - mean
    x_hat = x_hat * rstd
    if HAS_SHIFT and not IS_RMS:
        x_hat = x_hat - shift * rstd
    if i >= FULL:
        channel = i * x_hat.shape[0] + tl.arange(0, x_hat.shape[0])[:, None]
        x_hat = tl.where(channel < channels, x_hat, 0.0)
    return x_hat


@triton.jit(
    do_not_specialize=[
        "modulation_stride",
        "samples",
        "channels",
        "position_units",
        "seed",
        "dropout_threshold",
    ]
)
def layer_norm_backward_channels_first_tile_kernel(
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
    dx_ptr,
    dresidual_ptr,
    dweight_partial_ptr,
    dbias_partial_ptr,
    dgate_partial_ptr,
    samples,
    channels,
    position_units,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    GROUP: tl.constexpr,
    FULL: tl.constexpr,
    EVEN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MODULATED: tl.constexpr,
    EARLY_REDUCE: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write dx of tiles of BLOCK_P positions with all channels, and each program's partial sums for the parameters.

    Programs are persistent; a program of a MODULATED call processes tiles of one sample.  x and dy stay in the
    dtype of memory, and x_hat and dz are computed twice.  Statistics that are not saved are computed.
    """
    allow_next_launch(EARLY_REDUCE)
    positions = position_units * VEC
    n = channels.to(tl.float32)
    inverse_n = 1.0 / n
    first_tile, last_tile, step, partial, own_sample = divide_tiles(
        tl.program_id(0), tl.num_programs(0), samples, tl.cdiv(positions, BLOCK_P), MODULATED
    )
    modulation = own_sample * modulation_stride
    weights = load_channel_parameter(weight_ptr, 0, channels, FULL, BLOCK_C, CHUNKS)
    scales = load_channel_parameter(scale_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)
    biases = ()
    shifts = ()
    if ACTIVATION != "none":
        biases = load_channel_parameter(bias_ptr, 0, channels, FULL, BLOCK_C, CHUNKS)
        shifts = load_channel_parameter(shift_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)
    gates = load_channel_parameter(gate_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)
    dweights = ()
    dbiases = ()
    dgates = ()
    for _ in tl.static_range(CHUNKS):
        if dweight_partial_ptr is not None:
            dweights = dweights + (tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32),)
        if dbias_partial_ptr is not None:
            dbiases = dbiases + (tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32),)
        if dgate_partial_ptr is not None:
            dgates = dgates + (tl.zeros((BLOCK_C, BLOCK_P // GROUP), tl.float32),)

    for tile in tl.range(first_tile, last_tile, step, num_stages=1):
        sample, first = locate_tile(tile, positions, BLOCK_P)
        position = first + tl.arange(0, BLOCK_P)[None, :]
        position_mask = make_column_mask(position, positions, EVEN_P)
        start = sample * channels * positions
        row = sample * positions + position
        offsets = make_block_offsets(position, positions, BLOCK_C)
        chunks = load_channel_chunks(
            x_ptr, start, offsets, position_mask, channels, positions, FULL, BLOCK_C, CHUNKS
        )
        dys = load_channel_chunks(dy_ptr, start, offsets, position_mask, channels, positions, FULL, BLOCK_C, CHUNKS)
        residuals = load_channel_chunks(
            residual_ptr, start, offsets, position_mask, channels, positions, FULL, BLOCK_C, CHUNKS
        )
        if rstd_ptr is not None:
            rstd = tl.load(rstd_ptr + row, mask=position_mask, other=0.0)
            shift = tl.zeros_like(rstd)
            mean = shift
            if not IS_RMS:
                mean = tl.load(mean_ptr + row, mask=position_mask, other=0.0)
        else:
            mean, shift, variance = compute_position_moments(chunks, residuals, gates, channels, FULL, IS_RMS)
            # Positions that do not exist have dy = 0, whose product with an infinite rstd would be NaN.
            rstd = tl.where(position_mask, approximate_rsqrt(variance + eps), 0.0)

        # Sums start at 0, so that each thread rounds its first product as other threads see it.  None is a square,
        # from which the compiler would drop the 0.
        products = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        new_dweights = ()
        new_dbiases = ()
        for i in tl.static_range(CHUNKS):
            x_hat = _compute_x_hat(
                chunks, residuals, gates, i, mean, shift, rstd, channels, FULL, rstd_ptr is None, IS_RMS
            )
            factor = compute_factor(weights, scales, i, BLOCK_C, WEIGHT_OFFSET)
            addend = compute_addend(biases, scales, shifts, i, BLOCK_C)
            dz = backpropagate_channel_epilogue(
                widen(dys[i]), x_hat, factor, addend, row, i * BLOCK_C,
                seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT,
            )  # fmt: skip
            if dweight_partial_ptr is not None:
                new_dweights = new_dweights + (dweights[i] + sum_adjacent_positions(dz * x_hat, GROUP),)
            if dbias_partial_ptr is not None:
                new_dbiases = new_dbiases + (dbiases[i] + sum_adjacent_positions(dz, GROUP),)
            g = dz * factor
            products += g * x_hat
            if not IS_RMS:
                total += g
        dweights = new_dweights
        dbiases = new_dbiases
        c1, c2 = sum_pair(products, total, 0)
        c1 = c1 * inverse_n
        c2 = c2 * inverse_n
        new_dgates = ()
        for i in tl.static_range(CHUNKS):
            mask = make_chunk_mask(position_mask, i, channels, FULL, BLOCK_C)
            at = tl.cast(i * BLOCK_C, tl.int64) * positions + offsets
            x_hat = _compute_x_hat(
                chunks, residuals, gates, i, mean, shift, rstd, channels, FULL, rstd_ptr is None, IS_RMS
            )
            factor = compute_factor(weights, scales, i, BLOCK_C, WEIGHT_OFFSET)
            addend = compute_addend(biases, scales, shifts, i, BLOCK_C)
            dz = backpropagate_channel_epilogue(
                widen(dys[i]), x_hat, factor, addend, row, i * BLOCK_C,
                seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT,
            )  # fmt: skip
            dh = dz * factor - x_hat * c1
            if not IS_RMS:
                dh -= c2
            dh *= rstd
            if dresidual_out_ptr is not None:
                dh += widen(tl.load(dresidual_out_ptr + start + at, mask=mask, other=0.0))
            if dgate_partial_ptr is not None:
                new_dgates = new_dgates + (dgates[i] + sum_adjacent_positions(dh * widen(chunks[i]), GROUP),)
            store_input_gradients(dh, select_gate(gates, i), dx_ptr, dresidual_ptr, start, at, mask, "")
        dgates = new_dgates

    for i in tl.static_range(CHUNKS):
        channel = i * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
        mask = make_column_mask(channel, channels, i < FULL)
        at = partial * channels + channel
        if dweight_partial_ptr is not None:
            tl.store(dweight_partial_ptr + at, tl.sum(dweights[i], 1, keep_dims=True), mask=mask)
        if dbias_partial_ptr is not None:
            tl.store(dbias_partial_ptr + at, tl.sum(dbiases[i], 1, keep_dims=True), mask=mask)
        if dgate_partial_ptr is not None:
            tl.store(dgate_partial_ptr + at, tl.sum(dgates[i], 1, keep_dims=True), mask=mask)
