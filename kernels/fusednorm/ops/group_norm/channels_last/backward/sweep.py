"""Backward pass of channels-last samples in which one program reads a block of whole groups twice.

The first read is for the sums of columns and groups, the second, from L1 or L2, for dx.  No program waits for
another.  The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradient_tiles`.  The
tiles are those of `channels_last.stream_positions`, with a block's columns in place of a sample's: only the lanes
that are left over after a tile's last position are idle.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import add_residual_chunk, widen
from fusednorm.jit.reductions import multiply_rounded, sum_pair
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm.call import (
    GroupNormBackwardCall,
    GroupNormBackwardConfig,
    count_writers_per_group,
)
from fusednorm.ops.group_norm.channels_last.backward.stream import (
    accumulate_gradient_positions,
    load_backward_positions,
    load_masked_positions,
)
from fusednorm.ops.group_norm.channels_last.column_blocks import (
    count_max_overlaps,
    load_group_statistic,
    select_for_columns,
)
from fusednorm.ops.group_norm.channels_last.stream_positions import (
    locate_lanes,
    make_store_mask,
)
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue, load_scaled_slope_and_offset
from fusednorm.ops.group_norm.sample_shape import compute_access_width

STAGES = 4
"""Tiles that a program loads at once, all but one into shared memory.

With 3 and 4 tiles: 0.57 and 0.61 of a copy's speed (409x1280x16x16, bfloat16), 12.9 and 11.7 us (2x1280x16x16).
Four tiles at once without pipelining: 0.51 to 0.62, depending on registers, and 15.3 us.
"""

MAX_WRITERS = 4
"""The most programs that write a block together.

By an earlier form, without pipelined loads: 12.5 us with four, 14.5 with one (2x1280x16x16, bfloat16).
"""


@triton.jit
def _sum_block_columns(a, b, units, positions, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, IDLE: tl.constexpr):
    """Sum two tiles [LANES, VEC] over their positions, [1, COLUMNS] each; there are up to POSITIONS.

    Lanes that are idle do not count.
    """
    lanes: tl.constexpr = a.shape[0] * a.shape[1]
    if IDLE:
        columns = units * a.shape[1]
        row = tl.arange(0, POSITIONS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        in_block = (row < positions) & (column < columns)
        index = tl.reshape(tl.where(in_block, row * columns + column, 0), (POSITIONS * COLUMNS,))
        a = tl.reshape(tl.gather(tl.reshape(a, (lanes,)), index, 0), (POSITIONS, COLUMNS))
        b = tl.reshape(tl.gather(tl.reshape(b, (lanes,)), index, 0), (POSITIONS, COLUMNS))
        return sum_pair(tl.where(in_block, a, 0.0), tl.where(in_block, b, 0.0), 0)
    else:
        return sum_pair(tl.reshape(a, (POSITIONS, COLUMNS)), tl.reshape(b, (POSITIONS, COLUMNS)), 0)


@triton.jit(
    do_not_specialize=[
        "hw", "column_units", "block_units", "blocks", "writers", "groups", "channels", "scale_stride", "seed",
        "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_backward_sweep_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    hw: tl.int32,
    column_units: tl.int32,
    block_units: tl.int32,
    blocks: tl.int32,
    writers: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    IDLE: tl.constexpr,
    LABELS: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx of a block of a sample's columns, and the sums of dz and of dz * x_hat of each column.

    A block is `block_units` vectors of VEC columns, which are whole groups, at most GROUPS; a sample's last
    block may have fewer.  Each of `writers` programs reads the whole block for the sums, which are written to
    [N, C], and writes dx at its share of the positions.  Tiles are read from the first position on for the
    sums, and from the last one on for dx.  Here, dz is the gradient of the affine step's output.
    """
    allow_next_launch(EARLY)
    c = column_units * VEC
    writer = tl.program_id(0) % writers
    sample = (tl.program_id(0) // (writers * blocks)).to(tl.int64)
    block = tl.program_id(0) // writers % blocks
    block_first = block * block_units * VEC
    units = block_units
    if IDLE:
        units = tl.minimum(block_units, column_units - block * block_units)
    position, column, positions = locate_lanes(units, LANES, VEC)
    vector_group = (tl.arange(0, LANES)[:, None] % units) * VEC // channels
    group_index = column // channels - vector_group
    first_group = sample * groups + block_first // channels
    block_groups = units * VEC // channels
    all_lanes = tl.full(position.shape, True, tl.int1)
    channel = block_first + column
    mean = load_group_statistic(mean_ptr, first_group, vector_group, block_groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, first_group, vector_group, block_groups - 1, group_index, LABELS)
    slope, offset = load_scaled_slope_and_offset(
        parameters, channel, sample * scale_stride + channel, all_lanes, GAIN
    )
    scale = slope * rstd
    at = position * c + column
    tile_elements = positions * c
    tile_stride = tile_elements.to(tl.int64)
    steps = tl.cdiv(hw, positions)
    base = sample * hw * c + block_first
    sums = tl.zeros((LANES, VEC), tl.float32)
    sums_centred = tl.zeros((LANES, VEC), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        inside = step * tile_stride
        left = hw - step * positions
        tiles = load_backward_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile_elements, left,
            1, False, False, "evict_last",
        )  # fmt: skip
        sums, sums_centred = accumulate_gradient_positions(
            tiles, mean, scale, offset, sums, sums_centred, sample, block_first + inside + at, tile_elements,
            positions, left, position, seed, dropout_threshold, dropout_scale, negative_slope,
            False, IDLE, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
    sums_xhat = multiply_rounded(sums_centred, rstd)
    of_column, of_column_xhat = _sum_block_columns(sums, sums_xhat, units, positions, POSITIONS, COLUMNS, IDLE)
    block_column = tl.arange(0, COLUMNS)[None, :]
    column_mask = block_column < units * VEC
    if dz_part_ptr is not None:
        of_part = sample * c + block_first + block_column
        store_mask = column_mask & (writer == 0)
        tl.store(dz_part_ptr + of_part, of_column * (1.0 / GAIN), mask=store_mask)
        tl.store(dz_xhat_part_ptr + of_part, of_column_xhat * (1.0 / GAIN), mask=store_mask)
    block_channel = block_first + block_column
    block_slope, _ = load_scaled_slope_and_offset(
        parameters, block_channel, sample * scale_stride + block_channel, column_mask, GAIN
    )
    group_mask = column_mask & (block_column // channels == tl.arange(0, GROUPS)[:, None])
    sum_g, sum_g_xhat = sum_pair(
        tl.where(group_mask, multiply_rounded(of_column, block_slope), 0.0),
        tl.where(group_mask, multiply_rounded(of_column_xhat, block_slope), 0.0), 1,
    )  # fmt: skip
    sum_g = tl.reshape(sum_g, (GROUPS,))
    sum_g_xhat = tl.reshape(sum_g_xhat, (GROUPS,))
    label_sums = ()
    label_sums_xhat = ()
    for i in tl.static_range(LABELS):
        group = tl.reshape(tl.minimum(vector_group + i, block_groups - 1), (LANES,))
        label_sums = label_sums + (tl.reshape(tl.gather(sum_g, group, 0), (LANES, 1)),)
        label_sums_xhat = label_sums_xhat + (tl.reshape(tl.gather(sum_g_xhat, group, 0), (LANES, 1)),)
    inverse_size = 1.0 / (hw.to(tl.float32) * channels)
    constant = select_for_columns(label_sums, group_index) * inverse_size * rstd
    factor = select_for_columns(label_sums_xhat, group_index) * inverse_size * rstd * rstd
    for reverse_step in tl.range(writer, steps, writers, num_stages=STAGES):
        step = steps - 1 - reverse_step
        inside = step * tile_stride
        left = hw - step * positions
        tiles = load_backward_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile_elements, left,
            1, False, False, "evict_first",
        )  # fmt: skip
        dresidual_out = load_masked_positions(
            dresidual_out_ptr, base + inside, at, position, positions, units, tile_elements, left,
            1, False, False, "evict_first",
        )  # fmt: skip
        centred = add_residual_chunk(tiles[1], tiles[2], 0) - mean
        dz = backpropagate_scaled_epilogue(
            widen(tiles[0][0]), centred, scale, offset, sample, block_first + inside + at,
            seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        dx = dz * scale - (centred * factor + constant)
        if len(dresidual_out) > 0:
            dx += widen(dresidual_out[0])
        tl.store(
            dx_ptr + base + inside + at, dx.to(dx_ptr.dtype.element_ty),
            mask=make_store_mask(position, positions, units, left, 0, False, IDLE), eviction_policy="evict_first",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackwardBlockSweep(GroupNormBackwardConfig):
    """A configuration in which a program reads the columns of `block_groups` groups of a sample twice.

    A tile has one access per thread, at as many positions as fit.  Launches with fewer programs than half the
    multiprocessors use up to MAX_WRITERS programs per block.
    """

    block_groups: int
    num_warps: int

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launch for dx and the sums of columns, and the launches for parameter gradients."""
        sample = call.sample
        columns = self.block_groups * sample.group_channels
        vec = compute_access_width(call.x.element_size(), sample.c, columns)
        units, lanes = columns // vec, 32 * self.num_warps
        blocks = cdiv(sample.groups, self.block_groups)
        last_units = (sample.c - (blocks - 1) * columns) // vec
        has_idle_lanes = lanes % units != 0 or last_units != units
        writers = count_writers_per_group(call.n * blocks, MAX_WRITERS, count_multiprocessors(call.x.device))
        parts = call.allocate_partials_if_wanted(1)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *parts,
            sample.hw, sample.c // vec, units, blocks, writers, sample.groups, sample.group_channels,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "LANES": lanes,
            "POSITIONS": next_power_of_2(lanes // last_units),
            "COLUMNS": next_power_of_2(columns),
            # A tile for tl.gather needs more than one element.
            "GROUPS": max(2, next_power_of_2(self.block_groups)),
            "IDLE": has_idle_lanes,
            "LABELS": count_max_overlaps(sample.group_channels, vec),
            "STAGES": STAGES,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        return [
            Launch(group_norm_nhwc_backward_sweep_kernel, (call.n * blocks * writers,), arguments, options),
            *plan_parameter_reductions(parts, call.affine, call.out, 1, call.can_start_early),
        ]
