"""What the backward passes whose programs wait for nothing, and read x and dy twice, share in both layouts.

Each program has pieces of some channels of one sample.  x lies with channels last where LAST, and a companion of it
in the other layout where that is OTHER: its elements are then read one by one.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from fusednorm.launch.launch import Launch, dependent
from fusednorm.ops.group_norm.call import BackwardCall
from fusednorm.ops.group_norm.gradients import load_tiles, tile_gradient, tile_mask, write_tile
from fusednorm.ops.group_norm.reduce_sums import group_reduction, parameter_reductions
from fusednorm.ops.group_norm.sample import empty_statistics


def sums_and_apply(
    call: BackwardCall,
    kernels: tuple[Any, Any],
    grid: tuple[int, ...],
    shape: tuple[Any, ...],
    options: Mapping[str, object],
    splits: int,
) -> list[Launch]:
    """Sums of channels, their reduction to groups, dx, and the reduction to gradients of parameters."""
    sample = call.sample
    parts = call.parts(splits)
    sums_of_groups = empty_statistics(call.x, sample)
    sums_kernel, apply_kernel = kernels
    sums_arguments = (
        *call.inputs, call.parameters, call.mean, call.rstd, *parts, *shape
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, *sums_of_groups,
        call.out.dx, *shape,
    )  # fmt: skip
    sums_options = {
        **options,
        "DY_OTHER": call.lies_otherwise(call.dy),
        "RESIDUAL_OTHER": call.lies_otherwise(call.residual),
    }
    apply_options = {
        **sums_options,
        **dependent(call.early),
        "OUTSIDE_OTHER": call.lies_otherwise(call.dresidual_out),
    }
    return [
        Launch(sums_kernel, grid, sums_arguments, sums_options),
        group_reduction(parts, call.affine, sample, splits, sums_of_groups, call.early),
        Launch(apply_kernel, grid, apply_arguments, apply_options),
        *parameter_reductions(parts, call.affine, call.out, splits, call.early),
    ]


@triton.jit
def _start_of(
    sample, channel, position, hw, c, lane_channel, lane_position,
    STEP: tl.constexpr, LAST: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Where a tile starts, where its elements lie behind that, and how far the next tile is.

    Offsets behind the start are 32-bit where x itself lies so, 64-bit in the OTHER layout.
    """
    if LAST != OTHER:
        start = (sample * hw + position) * c + channel
        if OTHER:
            return start, lane_position.to(tl.int64) * c + lane_channel, c * STEP
        else:
            return start, lane_position * c.to(tl.int32) + lane_channel, c * STEP
    else:
        start = (sample * c + channel) * hw + position
        if OTHER:
            return start, lane_channel * hw + lane_position, tl.full((), STEP, tl.int64)
        else:
            return start, lane_channel * hw.to(tl.int32) + lane_position, tl.full((), STEP, tl.int32)


@triton.jit
def _load_piece(
    ptr, where, lanes, left, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr
):
    """`load_tiles` of what lies `where` `_start_of` says.

    `lanes` is channel, position and existence of each element of a tile, or of its lane, behind the tile's start.
    """
    return load_tiles(ptr, where[0], where[1], where[2], lanes[1], left, lanes[2], True, EVEN, STEP, CHUNKS, EVICT)


@triton.jit
def _inside(start, at, places, elements, LAST: tl.constexpr):
    """Where in its sample a tile's elements lie, `places` positions or `elements` behind the first tile's.

    The order decides what the compiler makes of it: each layout has the one that it was measured with.
    """
    if LAST:
        return start + elements + at
    else:
        return start + at + places


@triton.jit
def sums_of_pieces(
    dy_ptr, x_ptr, residual_ptr, sample, channel, first, pieces, hw, c, lanes, mean, slope, rstd, offset, dropout,
    LANES: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    LAST: tl.constexpr, DY_OTHER: tl.constexpr, RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums of GAIN * dz, and of that times h - mean, [LANES, WIDTH]: WIDTH 1, of each lane; else of each element.

    Args:
        sample, channel, first: in which the first piece starts, `first` being a position.
        lanes: as `_load_piece` takes them.
        dropout: seed, threshold and scale.
    """
    RUN: tl.constexpr = CHUNKS * STEP
    sum_dz = tl.zeros((LANES, WIDTH), tl.float32)
    sum_dz_centred = tl.zeros((LANES, WIDTH), tl.float32)
    for piece in range(0, pieces):
        position = first + piece * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, False)
        of_dy = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, DY_OTHER)
        of_residual = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, RESIDUAL_OTHER)
        tiles = (
            _load_piece(dy_ptr, of_dy, lanes, left, STEP, CHUNKS, EVEN, "evict_last"),
            _load_piece(x_ptr, (start, at, step), lanes, left, STEP, CHUNKS, EVEN, "evict_last"),
            _load_piece(residual_ptr, of_residual, lanes, left, STEP, CHUNKS, EVEN, "evict_last"),
        )
        for i in tl.static_range(CHUNKS):
            centred, dz = tile_gradient(
                tiles, i, lanes[1] + i * STEP, left, lanes[2], mean, slope * rstd, offset, sample.to(tl.int64),
                _inside(start - sample * c * hw, at, i * STEP, i * step, LAST), dropout[0], dropout[1], dropout[2],
                EVEN, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            if WIDTH == 1:
                sum_dz += tl.sum(dz, 1, keep_dims=True)
                sum_dz_centred += tl.sum(dz * centred, 1, keep_dims=True)
            else:
                sum_dz += dz
                sum_dz_centred += dz * centred
    return sum_dz, sum_dz_centred


@triton.jit
def write_pieces(
    dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr, sample, channel, first, pieces, hw, c, lanes,
    mean, scale, offset, constant, factor, dropout,
    STEP: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    LAST: tl.constexpr, DY_OTHER: tl.constexpr, RESIDUAL_OTHER: tl.constexpr, OUTSIDE_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dx of what `sums_of_pieces` takes, the last piece first, by `constant` and `factor` of `write_tile`."""
    RUN: tl.constexpr = CHUNKS * STEP
    for back in range(0, pieces):
        position = first + (pieces - 1 - back) * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, False)
        of_dy = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, DY_OTHER)
        of_outside = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, OUTSIDE_OTHER)
        of_residual = _start_of(sample, channel, position, hw, c, lanes[0], lanes[1], STEP, LAST, RESIDUAL_OTHER)
        tiles = (
            _load_piece(dy_ptr, of_dy, lanes, left, STEP, CHUNKS, EVEN, "evict_first"),
            _load_piece(x_ptr, (start, at, step), lanes, left, STEP, CHUNKS, EVEN, "evict_first"),
            _load_piece(residual_ptr, of_residual, lanes, left, STEP, CHUNKS, EVEN, "evict_first"),
        )
        outsides = _load_piece(dresidual_out_ptr, of_outside, lanes, left, STEP, CHUNKS, EVEN, "evict_first")
        for i in tl.static_range(CHUNKS):
            centred, dz = tile_gradient(
                tiles, i, lanes[1] + i * STEP, left, lanes[2], mean, scale, offset, sample.to(tl.int64),
                _inside(start - sample * c * hw, at, i * STEP, i * step, LAST), dropout[0], dropout[1], dropout[2],
                True, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            write_tile(
                centred, dz, dx_ptr, outsides[i : i + 1], start + i * step + at,
                tile_mask(lanes[1] + i * STEP, left, lanes[2], True, EVEN),
                scale, constant, factor, FAST, "evict_first",
            )  # fmt: skip
