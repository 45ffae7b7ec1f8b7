"""Backward pass that streams channels-last samples twice: sums of each column first, then dx.

The formulas are in `contiguous.backward.tile`, z's slope and offset, and GAIN, in `gradients`, the tiles in
`channels_last.positions`.  No program waits for another.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.loads import add_residual_chunk, widen
from fusednorm.jit.reductions import multiply_rounded
from fusednorm.launch.launches import Launch, can_prefetch, make_early_options
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.backward.positions import (
    accumulate_gradient_positions,
    load_gradient_positions,
    load_masked_positions,
    prefetch_gradient_positions,
    sum_columns,
)
from fusednorm.ops.group_norm.channels_last.column_blocks import count_max_overlaps, load_group_statistic
from fusednorm.ops.group_norm.channels_last.stream_partitions import make_stream_partition
from fusednorm.ops.group_norm.channels_last.stream_positions import count_split_steps, locate_lanes, make_store_mask
from fusednorm.ops.group_norm.gradient_reductions import plan_group_reduction, plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue, load_scaled_slope_and_offset
from fusednorm.ops.group_norm.sample_shape import allocate_statistics


@dataclass(frozen=True, slots=True)
class BackwardSampleStream(GroupNormBackwardConfig):
    """Sums over up to `splits` parts of each channels-last sample, with all columns of a position in a tile.

    A thread has `chunks` accesses per step; for dx a program has `apply_fragments` fragments of `apply_chunks`
    accesses.
    """

    num_warps: int
    chunks: int
    apply_chunks: int
    apply_fragments: int
    splits: int

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        sample = call.sample
        partition = make_stream_partition(sample, call.x.element_size(), self, call.n, call.x.device)
        parts = call.allocate_partials(partition.splits)
        sums_of_groups = allocate_statistics(call.x, sample)
        fragment = partition.positions * partition.apply_chunks
        fragments = 1 if partition.has_extra_splits else self.apply_fragments
        programs = cdiv(sample.hw, fragment * fragments)
        epilogue = (call.affine.sample_stride, *call.options.dropout_arguments)
        sums = (
            *call.inputs, call.parameters, call.mean, call.rstd, *parts, sample.hw, partition.position_vectors,
            sample.groups, sample.group_channels, partition.splits, *epilogue,
        )  # fmt: skip
        apply = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, *sums_of_groups,
            call.out.dx, sample.hw, partition.position_vectors, sample.groups, sample.group_channels, call.n,
            fragments, *epilogue,
        )  # fmt: skip
        options = {
            **partition.make_tile_options(self.num_warps),
            "IDLE": partition.has_idle_lanes,
            "LABELS": count_max_overlaps(sample.group_channels, partition.vec),
            "PREFETCH": can_prefetch(sample.c, *call.inputs),
            **call.gradient_options,
        }
        sums_options = {
            **options,
            "POSITIONS": partition.positions,
            "COLUMNS": partition.vec * next_power_of_2(partition.position_vectors),
            "CHUNKS": self.chunks,
            "WHOLE": sample.hw % partition.step_positions == 0,
            "EARLY": call.can_start_early,
        }
        apply_options = {
            **options,
            "CHUNKS": partition.apply_chunks,
            "WHOLE": sample.hw % (fragment * fragments) == 0,
            **make_early_options(call.can_start_early),
        }
        return [
            Launch(group_norm_nhwc_backward_stream_sums_kernel, (call.n * partition.splits,), sums, sums_options),
            plan_group_reduction(
                parts, call.affine, sample, partition.splits, sums_of_groups, call.can_start_early
            ),
            Launch(group_norm_nhwc_backward_stream_apply_kernel, (call.n * programs,), apply, apply_options),
            *plan_parameter_reductions(
                parts, call.affine, call.out, partition.splits, call.can_start_early, beside=True
            ),
        ]


@triton.jit(
    do_not_specialize=[
        "hw", "units", "groups", "channels", "splits", "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_backward_stream_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    hw: tl.int32,
    units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    LABELS: tl.constexpr,
    PREFETCH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write sums of dz and dz * x_hat of each column over a split of a sample to [N, splits, C].

    A program processes every `splits`th step of CHUNKS tiles; with PREFETCH it prefetches its next step into L2.
    """
    allow_next_launch(EARLY)
    c = units * VEC
    position, column, positions = locate_lanes(units, LANES, VEC)
    at = position * c + column
    tile = positions * c
    step_positions = positions * CHUNKS
    stride = (splits * step_positions).to(tl.int64) * c
    first_column = (tl.arange(0, LANES)[:, None] % units) * VEC
    first_group = first_column // channels
    group_index = column // channels - first_group
    there = tl.full(position.shape, True, tl.int1)
    program = tl.program_id(0)
    sample = (program // splits).to(tl.int64)
    split = program % splits
    turns, left = count_split_steps(split, hw, splits, step_positions)
    whole = turns
    if not WHOLE:
        whole = turns - (left < step_positions).to(tl.int32)
    inside = split.to(tl.int64) * step_positions * c
    base = sample * hw * c
    if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
        if whole > 0:
            # Parameters and statistics are loaded from memory too, and the code below waits for them.
            prefetch_gradient_positions(dy_ptr, x_ptr, residual_ptr, base + inside, CHUNKS * tile)
    mean = load_group_statistic(mean_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    slope, offset = load_scaled_slope_and_offset(parameters, column, sample * scale_stride + column, there, GAIN)
    scale = slope * rstd
    sums = tl.zeros((LANES, VEC), tl.float32)
    sums_centred = tl.zeros((LANES, VEC), tl.float32)
    for turn in range(0, whole):
        tiles = load_gradient_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, 0,
            CHUNKS, True, IDLE, "",
        )  # fmt: skip
        if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
            if turn + 1 < whole:
                prefetch_gradient_positions(dy_ptr, x_ptr, residual_ptr, base + inside + stride, CHUNKS * tile)
        sums, sums_centred = accumulate_gradient_positions(
            tiles, mean, scale, offset, sums, sums_centred, sample, inside + at, tile, positions, 0, position,
            seed, dropout_threshold, dropout_scale, True, IDLE, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        inside += stride
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if whole < turns:
            tiles = load_gradient_positions(
                dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, left,
                CHUNKS, False, IDLE, "",
            )  # fmt: skip
            sums, sums_centred = accumulate_gradient_positions(
                tiles, mean, scale, offset, sums, sums_centred, sample, inside + at, tile, positions, left,
                position, seed, dropout_threshold, dropout_scale, False, IDLE, ACTIVATION, DROPOUT, GAIN,
            )  # fmt: skip
    sums *= 1.0 / GAIN
    sums_centred = multiply_rounded(sums_centred, rstd * (1.0 / GAIN))
    of_column, of_column_xhat, here = sum_columns(sums, sums_centred, units, POSITIONS, COLUMNS, IDLE)
    of_part = program.to(tl.int64) * c + tl.arange(0, COLUMNS)[None, :]
    tl.store(dz_part_ptr + of_part, of_column, mask=here)
    tl.store(dz_xhat_part_ptr + of_part, of_column_xhat, mask=here)


@triton.jit(
    do_not_specialize=[
        "hw", "units", "groups", "channels", "samples", "fragments", "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_backward_stream_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    dx_ptr,
    hw: tl.int32,
    units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    samples: tl.int32,
    fragments: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    LABELS: tl.constexpr,
    PREFETCH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write dx of `fragments` fragments of CHUNKS tiles per program.

    The last positions of all samples are processed first, as they were read last.  A kernel that starts next can
    rely on complete sums of columns.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program % samples).to(tl.int64)
    c = units * VEC
    position, column, positions = locate_lanes(units, LANES, VEC)
    at = position * c + column
    tile = positions * c
    fragment_positions = positions * CHUNKS
    base = sample * hw * c
    first_column = (tl.arange(0, LANES)[:, None] % units) * VEC
    first_group = first_column // channels
    group_index = column // channels - first_group
    mean = load_group_statistic(mean_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    there = tl.full(position.shape, True, tl.int1)
    slope, offset = load_scaled_slope_and_offset(parameters, column, sample * scale_stride + column, there, GAIN)
    scale = slope * rstd
    await_previous_launch(EARLY)
    allow_next_launch(EARLY)
    sum_g = load_group_statistic(sum_g_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    sum_g_xhat = load_group_statistic(sum_g_xhat_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    inverse_size = 1.0 / (hw.to(tl.float32) * channels)
    constant = sum_g * inverse_size * rstd
    factor = sum_g_xhat * inverse_size * rstd * rstd
    first = (program // samples).to(tl.int64) * fragments * fragment_positions
    for back in range(0, fragments):
        start_position = first + (fragments - 1 - back) * fragment_positions
        inside = start_position * c
        left = tl.minimum(hw - start_position, fragment_positions).to(tl.int32)
        tiles = load_gradient_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, left,
            CHUNKS, WHOLE, IDLE, "evict_first",
        )  # fmt: skip
        outsides = load_masked_positions(
            dresidual_out_ptr, base + inside, at, position, positions, units, tile, left,
            CHUNKS, WHOLE, IDLE, "evict_first",
        )  # fmt: skip
        if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
            if back + 1 < fragments and start_position <= hw:
                prefetch_gradient_positions(
                    dy_ptr, x_ptr, residual_ptr, base + inside - CHUNKS * tile, CHUNKS * tile
                )
        for i in tl.static_range(CHUNKS):
            centred = add_residual_chunk(tiles[1], tiles[2], i) - mean
            dz = backpropagate_scaled_epilogue(
                widen(tiles[0][i]), centred, scale, offset, sample, inside + at + i * tile,
                seed, dropout_threshold, dropout_scale, ACTIVATION, DROPOUT, GAIN,
            )  # fmt: skip
            dx = dz * scale - (centred * factor + constant)
            if len(outsides) > 0:
                dx += widen(outsides[i])
            tl.store(
                dx_ptr + base + inside + i * tile + at, dx.to(dx_ptr.dtype.element_ty),
                mask=make_store_mask(position, positions, units, left, i, WHOLE, IDLE),
                eviction_policy="evict_first",
            )  # fmt: skip
