"""Forward pass over channels, with all channels of a tile of positions in the registers of one program."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.loads import make_column_mask
from fusednorm.jit.moments import store_row_statistics
from fusednorm.launch.launches import Launch, compute_max_registers
from fusednorm.ops.layer_norm.call import LayerNormForwardCall
from fusednorm.ops.layer_norm.channels_first.position_tiles import (
    PositionTiles,
    apply_channel_affine,
    apply_channel_epilogue,
    compute_position_moments,
    compute_sum_chunk,
    list_modulation_arguments,
    load_channel_chunks,
    load_channel_parameter,
    locate_tile,
    make_block_offsets,
    make_chunk_mask,
)


@dataclass(frozen=True, slots=True)
class ChannelsFirstForwardTile:
    """A configuration in which each program holds all channels of `block_p` positions.

    A thread has as many registers as `programs_per_sm` resident programs allow.
    """

    block_p: int
    num_warps: int
    programs_per_sm: int


def plan_channels_tile_forward(call: LayerNormForwardCall, config: ChannelsFirstForwardTile) -> list[Launch]:
    """Plan the launch of a pass whose channels fit a program."""
    y, residual_out, *_ = call.outputs
    tiles = PositionTiles.of_call(call, config.block_p, *call.strided_inputs, y, residual_out)
    options = {
        **tiles.make_channel_chunks(config.num_warps),
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        "maxnreg": compute_max_registers(config),
        **call.make_epilogue_constexprs(),
    }
    scalars = (*tiles.sizes, call.options.eps, *call.options.epilogue_arguments)
    arguments = (*call.tensors, *list_modulation_arguments(call), *scalars)
    grid = (tiles.samples * tiles.tiles_per_sample,)
    return [Launch(layer_norm_forward_channels_first_tile_kernel, grid, arguments, options)]


@triton.jit(
    do_not_specialize=["modulation_stride", "channels", "position_units", "seed", "dropout_threshold"],
)
def layer_norm_forward_channels_first_tile_kernel(
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
    modulation_stride: tl.int64,
    channels,
    position_units,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    FULL: tl.constexpr,
    EVEN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of all channels of BLOCK_P positions per program.  x is read once and held in CHUNKS chunks."""
    positions = position_units * VEC
    sample, first = locate_tile(tl.program_id(0), positions, BLOCK_P)
    position = first + tl.arange(0, BLOCK_P)[None, :]
    position_mask = make_column_mask(position, positions, EVEN_P)
    start = sample * channels * positions
    row = sample * positions + position
    offsets = make_block_offsets(position, positions, BLOCK_C)
    chunks = load_channel_chunks(x_ptr, start, offsets, position_mask, channels, positions, FULL, BLOCK_C, CHUNKS)
    residuals = load_channel_chunks(
        residual_ptr, start, offsets, position_mask, channels, positions, FULL, BLOCK_C, CHUNKS
    )
    modulation = sample * modulation_stride
    weights = load_channel_parameter(weight_ptr, 0, channels, FULL, BLOCK_C, CHUNKS)
    biases = load_channel_parameter(bias_ptr, 0, channels, FULL, BLOCK_C, CHUNKS)
    scales = load_channel_parameter(scale_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)
    shifts = load_channel_parameter(shift_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)
    gates = load_channel_parameter(gate_ptr, modulation, channels, FULL, BLOCK_C, CHUNKS)

    pivot, shift, variance = compute_position_moments(chunks, residuals, gates, channels, FULL, IS_RMS)
    rstd = approximate_rsqrt(variance + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, pivot, shift, rstd, position_mask)
    for i in tl.static_range(CHUNKS):
        mask = make_chunk_mask(position_mask, i, channels, FULL, BLOCK_C)
        at = start + tl.cast(i * BLOCK_C, tl.int64) * positions + offsets
        h = compute_sum_chunk(chunks, residuals, gates, i)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        if IS_RMS:
            y = h * rstd
        else:
            y = (h - pivot) * rstd - shift * rstd
        y = apply_channel_affine(y, weights, biases, scales, shifts, i, BLOCK_C, WEIGHT_OFFSET)
        y = apply_channel_epilogue(
            y, row, i * BLOCK_C, seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT
        )
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
