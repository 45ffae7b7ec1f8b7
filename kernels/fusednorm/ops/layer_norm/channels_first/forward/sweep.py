"""Forward pass over more channels than a program holds: each program reads the channels of its positions twice."""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.loads import make_column_mask
from fusednorm.jit.moments import store_row_statistics
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm.call import LayerNormForwardCall
from fusednorm.ops.layer_norm.channels_first.channel_blocks import (
    compute_swept_mean_and_variance,
    load_channel_block,
    load_factor_and_addend,
)
from fusednorm.ops.layer_norm.channels_first.position_tiles import (
    PositionTiles,
    apply_channel_epilogue,
    list_modulation_arguments,
    locate_tile,
)


@dataclass(frozen=True, slots=True)
class ChannelsFirstForwardSweep:
    """A configuration in which each program reads all channels of `block_p` positions twice, in blocks."""

    block_p: int
    num_warps: int


def plan_channels_sweep_forward(call: LayerNormForwardCall, config: ChannelsFirstForwardSweep) -> list[Launch]:
    """Plan the launch of a pass over any number of channels; without a y it computes only mean and rstd."""
    y, residual_out, *_ = call.outputs
    tiles = PositionTiles.of_call(call, config.block_p, *call.strided_inputs, y, residual_out)
    options = {
        **tiles.make_block_options(tiles.compute_block_c(config.num_warps)),
        "IS_RMS": call.options.is_rms,
        "num_warps": config.num_warps,
        **call.make_epilogue_constexprs(),
    }
    scalars = (*tiles.sizes, call.options.eps, *call.options.epilogue_arguments)
    arguments = (*call.tensors, *list_modulation_arguments(call), *scalars)
    grid = (tiles.samples * tiles.tiles_per_sample,)
    return [Launch(layer_norm_forward_channels_first_sweep_kernel, grid, arguments, options)]


@triton.jit(
    do_not_specialize=["modulation_stride", "channels", "position_units", "seed", "dropout_threshold"],
)
def layer_norm_forward_channels_first_sweep_kernel(
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
    EVEN_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of all channels of BLOCK_P positions per program, in two sweeps; the second one is backwards."""
    positions = position_units * VEC
    sample, first = locate_tile(tl.program_id(0), positions, BLOCK_P)
    position = first + tl.arange(0, BLOCK_P)[None, :]
    position_mask = make_column_mask(position, positions, EVEN_P)
    start = sample * channels * positions
    row = sample * positions + position
    modulation = sample * modulation_stride
    rough, shift, variance = compute_swept_mean_and_variance(
        x_ptr, residual_ptr, gate_ptr, start, modulation, position, position_mask, channels, positions,
        BLOCK_C, IS_RMS,
    )  # fmt: skip
    rstd = approximate_rsqrt(variance + eps)
    store_row_statistics(mean_ptr, rstd_ptr, row, rough, shift, rstd, position_mask)
    if y_ptr is not None:
        blocks = tl.cdiv(channels, BLOCK_C)
        for step in range(0, blocks):
            first_channel = (blocks - 1 - step) * BLOCK_C
            at, mask, _, h, _ = load_channel_block(
                x_ptr, residual_ptr, gate_ptr, start, modulation, first_channel, position, position_mask,
                channels, positions, BLOCK_C,
            )  # fmt: skip
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            if IS_RMS:
                y = h * rstd
            else:
                y = (h - rough) * rstd - shift * rstd
            factor, addend = load_factor_and_addend(
                weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation, first_channel, channels,
                BLOCK_C, WEIGHT_OFFSET, True,
            )  # fmt: skip
            y = y * factor + addend
            y = apply_channel_epilogue(
                y, row, first_channel, seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT
            )
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
