"""Code of the split backward passes of both layouts: their programs wait for nothing, and read x and dy twice.

Each program processes fragments of some channels of one sample.  LAST means that x is channels-last.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from fusednorm.jit.reductions import multiply_for_uniform_sum
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.call import GroupNormBackwardCall
from fusednorm.ops.group_norm.gradient_reductions import plan_group_reduction, plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import (
    compute_tile_centred_and_dz,
    load_tiles,
    make_tile_mask,
    store_tile_gradient,
)
from fusednorm.ops.group_norm.sample_shape import allocate_statistics


def plan_split_backward_launches(
    call: GroupNormBackwardCall,
    kernels: tuple[Any, Any],
    grid: tuple[int, ...],
    last_arguments: tuple[Any, ...],
    options: Mapping[str, object],
    splits: int,
) -> list[Launch]:
    """Plan the launches of a backward pass in which no program waits for another.  They compute the sums of
    channels, the sums of groups, dx, and the parameter gradients.

    Args:
        kernels: the kernel for the sums of channels and the kernel for dx.
        grid, options: the grid and the constexprs of both kernels.
        last_arguments: the last arguments of both kernels.
        splits: the number of partial sums of each channel in a sample.
    """
    sample = call.sample
    parts = call.allocate_partials(splits)
    sums_of_groups = allocate_statistics(call.x, sample)
    sums_kernel, apply_kernel = kernels
    sums_arguments = (
        *call.inputs, call.parameters, call.mean, call.rstd, *parts, *last_arguments
    )  # fmt: skip
    apply_arguments = (
        *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, *sums_of_groups,
        call.out.dx, *last_arguments,
    )  # fmt: skip
    return [
        Launch(sums_kernel, grid, sums_arguments, options),
        plan_group_reduction(parts, call.affine, sample, splits, sums_of_groups, call.can_start_early),
        Launch(apply_kernel, grid, apply_arguments, {**options, **make_early_options(call.can_start_early)}),
        *plan_parameter_reductions(parts, call.affine, call.out, splits, call.can_start_early),
    ]


@triton.jit
def _locate_tile(
    sample, channel, position, hw, c, lane_channel, lane_position, STEP: tl.constexpr, LAST: tl.constexpr
):
    """Compute a tile's start, its elements' 32-bit offsets from there, and the step to the next tile.

    All are numbers of elements of x.  The tile starts at `channel` and `position` of a sample.
    `lane_channel` and `lane_position` are the elements' channels and positions, counted from that start.
    """
    if LAST:
        start = (sample * hw + position) * c + channel
        return start, lane_position * c.to(tl.int32) + lane_channel, c * STEP
    else:
        start = (sample * c + channel) * hw + position
        return start, lane_channel * hw.to(tl.int32) + lane_position, tl.full((), STEP, tl.int32)


@triton.jit
def _load_fragment(
    ptr,
    tile_location,
    lane_coordinates,
    left,
    STEP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load a fragment, CHUNKS consecutive tiles, by `load_tiles`.  The result is () if ptr is None.

    `tile_location` is the result of `_locate_tile`; `lane_coordinates` is (channel, position, exists) of
    each element of a tile, or of each lane, counted from the tile's start.
    """
    return load_tiles(
        ptr,
        tile_location[0],
        tile_location[1],
        tile_location[2],
        lane_coordinates[1],
        left,
        lane_coordinates[2],
        True,
        EVEN,
        STEP,
        CHUNKS,
        EVICT,
    )


@triton.jit
def _compute_sample_offsets(start, at, position_step, element_step, LAST: tl.constexpr):
    """Compute the offsets of a tile's elements from the start of their sample, for dropout's mask.

    The tile is `position_step` positions, which are `element_step` elements, after the fragment's first
    tile.  The order of the additions changes the compiled code; each layout keeps the order of its
    measurements.
    """
    if LAST:
        return start + element_step + at
    else:
        return start + at + position_step


@triton.jit
def sum_fragment_gradients(
    dy_ptr, x_ptr, residual_ptr, sample, channel, first, fragments, hw, c, lane_coordinates,
    mean, slope, rstd, offset, epilogue,
    LANES: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    LAST: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Sum GAIN * dz and GAIN * dz * (h - mean) over a program's fragments, [LANES, WIDTH] each.

    Here, dz is the gradient of the affine step's output.  There is a sum for each lane if WIDTH is 1, else
    for each element of a tile.

    Args:
        sample, channel, first: sample, channel and position at which the first fragment starts.
        fragments: the number of consecutive fragments.
        lane_coordinates: the argument `lane_coordinates` of `_load_fragment`.
        epilogue: seed, threshold and scale of dropout, and the negative slope.
    """
    RUN: tl.constexpr = CHUNKS * STEP
    sum_dz = tl.zeros((LANES, WIDTH), tl.float32)
    sum_dz_centred = tl.zeros((LANES, WIDTH), tl.float32)
    for fragment in range(0, fragments):
        position = first + fragment * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _locate_tile(
            sample, channel, position, hw, c, lane_coordinates[0], lane_coordinates[1], STEP, LAST
        )
        tiles = (
            _load_fragment(dy_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_last"),
            _load_fragment(x_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_last"),
            _load_fragment(
                residual_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_last"
            ),
        )
        for i in tl.static_range(CHUNKS):
            centred, dz = compute_tile_centred_and_dz(
                tiles, i, lane_coordinates[1] + i * STEP, left, lane_coordinates[2],
                mean, slope * rstd, offset, sample.to(tl.int64),
                _compute_sample_offsets(start - sample * c * hw, at, i * STEP, i * step, LAST),
                epilogue[0], epilogue[1], epilogue[2], epilogue[3], EVEN, ACTIVATION, DROPOUT, GAIN,
            )  # fmt: skip
            if WIDTH == 1:
                sum_dz += tl.sum(dz, 1, keep_dims=True)
                sum_dz_centred += tl.sum(multiply_for_uniform_sum(dz, centred), 1, keep_dims=True)
            else:
                sum_dz += dz
                sum_dz_centred += dz * centred
    return sum_dz, sum_dz_centred


@triton.jit
def store_fragment_gradients(
    dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr, sample, channel, first, fragments, hw, c,
    lane_coordinates, mean, scale, offset, constant, factor, epilogue,
    STEP: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    LAST: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute and store dx of a program's `fragments` consecutive fragments, last fragment first.

    `scale`, `constant` and `factor` are arguments of `store_tile_gradient`; the others are those of
    `sum_fragment_gradients`.
    """
    RUN: tl.constexpr = CHUNKS * STEP
    for back in range(0, fragments):
        position = first + (fragments - 1 - back) * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _locate_tile(
            sample, channel, position, hw, c, lane_coordinates[0], lane_coordinates[1], STEP, LAST
        )
        tiles = (
            _load_fragment(dy_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_first"),
            _load_fragment(x_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_first"),
            _load_fragment(
                residual_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_first"
            ),
        )
        dresidual_outs = _load_fragment(
            dresidual_out_ptr, (start, at, step), lane_coordinates, left, STEP, CHUNKS, EVEN, "evict_first"
        )
        for i in tl.static_range(CHUNKS):
            centred, dz = compute_tile_centred_and_dz(
                tiles, i, lane_coordinates[1] + i * STEP, left, lane_coordinates[2],
                mean, scale, offset, sample.to(tl.int64),
                _compute_sample_offsets(start - sample * c * hw, at, i * STEP, i * step, LAST),
                epilogue[0], epilogue[1], epilogue[2], epilogue[3], True, ACTIVATION, DROPOUT, GAIN,
            )  # fmt: skip
            store_tile_gradient(
                centred, dz, dx_ptr, dresidual_outs[i : i + 1], start + i * step + at,
                make_tile_mask(lane_coordinates[1] + i * STEP, left, lane_coordinates[2], True, EVEN),
                scale, constant, factor, "evict_first",
            )  # fmt: skip
