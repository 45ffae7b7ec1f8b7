"""Backward pass that streams channels-last samples twice: sums of each column first, then dx.

No program waits for another.  The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in
`gradient_tiles`; the tiles in `channels_last.stream_positions`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.loads import add_residual_chunk, widen
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import multiply_rounded, sum_pair
from fusednorm.launch.launches import Launch, can_prefetch, make_early_options
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.column_blocks import count_max_overlaps, load_group_statistic
from fusednorm.ops.group_norm.channels_last.stream_partitions import make_stream_partition
from fusednorm.ops.group_norm.channels_last.stream_positions import (
    count_steps_and_last_positions,
    locate_lanes,
    make_position_mask,
    make_store_mask,
)
from fusednorm.ops.group_norm.gradient_reductions import plan_group_reduction, plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue, load_scaled_slope_and_offset
from fusednorm.ops.group_norm.sample_shape import allocate_statistics


@triton.jit
def load_masked_positions(
    ptr, start, at, position, positions, units, step, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS tiles [LANES, VEC] from ptr + start on, `step` elements apart; () if ptr is None.

    Elements of positions that do not exist are 0, and so are those of idle lanes, which are left over after
    a tile's last position.  Masked loads run one at a time and need fewer registers: for data prefetched
    into L2, more programs are faster.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = make_store_mask(position, positions, units, left, i, WHOLE, IDLE)
            tiles = tiles + (tl.load(ptr + start + i * step + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def load_backward_positions(
    dy_ptr, x_ptr, residual_ptr, start, at, position, positions, units, tile, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load tiles of dy, x and residual at the same offsets by `load_masked_positions`.

    Return a tuple of tiles for each.  The residual's tuple of tiles is empty if residual_ptr is None.
    """
    return (
        load_masked_positions(
            dy_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT
        ),
        load_masked_positions(x_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT),
        load_masked_positions(
            residual_ptr, start, at, position, positions, units, tile, left, CHUNKS, WHOLE, IDLE, EVICT
        ),
    )


@triton.jit
def prefetch_backward_positions(dy_ptr, x_ptr, residual_ptr, start, count):
    """Prefetch `count` elements of dy, x and residual into L2, from `start` on.  The residual may be None."""
    prefetch(dy_ptr + start, count)
    prefetch(x_ptr + start, count)
    if residual_ptr is not None:
        prefetch(residual_ptr + start, count)


@triton.jit
def accumulate_gradient_positions(
    tiles, mean, scale, offset, sums, sums_centred, sample, sample_at, tile, positions, left, position,
    seed, dropout_threshold, dropout_scale, negative_slope,
    WHOLE: tl.constexpr, IDLE: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Add tiles to two running sums for each column of a lane: of GAIN * dz and of GAIN * dz * (h - mean).

    Return both sums, [LANES, VEC] each.  `tiles` is the result of `load_backward_positions`; `sample_at` are
    the offsets of the first tile's elements in the sample, and `tile` is the number of elements of a tile.
    """
    for i in tl.static_range(len(tiles[0])):
        centred = add_residual_chunk(tiles[1], tiles[2], i) - mean
        if not WHOLE:
            # z of an element that does not exist may be infinite, and 0 * inf = NaN would spoil a sum.
            centred = tl.where(make_position_mask(position, positions, left, i, WHOLE), centred, 0.0)
        dz = backpropagate_scaled_epilogue(
            widen(tiles[0][i]), centred, scale, offset, sample, sample_at + i * tile,
            seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        sums += dz
        sums_centred += dz * centred
    return sums, sums_centred


@triton.jit
def sum_columns(a, b, units, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, IDLE: tl.constexpr):
    """Sum two tiles [LANES, VEC] over their positions, so that one sum per column remains, [1, COLUMNS] each.

    Also returns the mask of columns that exist, [1, COLUMNS].

    If no lane is idle, lanes are [POSITIONS, COLUMNS]; else positions start at any multiple of `units`
    lanes.
    """
    lanes: tl.constexpr = a.shape[0] * a.shape[1]
    if IDLE:
        column = tl.arange(0, COLUMNS)
        columns = units * a.shape[1]
        flat_a = tl.reshape(a, (lanes,))
        flat_b = tl.reshape(b, (lanes,))
        sum_a = tl.zeros((COLUMNS,), tl.float32)
        sum_b = tl.zeros((COLUMNS,), tl.float32)
        for position in tl.static_range(POSITIONS):
            index = tl.minimum(position * columns + column, lanes - 1)
            sum_a += tl.gather(flat_a, index, 0)
            sum_b += tl.gather(flat_b, index, 0)
        return sum_a[None, :], sum_b[None, :], (column < columns)[None, :]
    else:
        sum_a, sum_b = sum_pair(tl.reshape(a, (POSITIONS, COLUMNS)), tl.reshape(b, (POSITIONS, COLUMNS)), 0)
        return sum_a, sum_b, tl.full((1, COLUMNS), True, tl.int1)


@dataclass(frozen=True, slots=True)
class BackwardSampleStream(GroupNormBackwardConfig):
    """A configuration that reads each channels-last sample twice: for sums of columns, then for dx.

    For the sums, a sample is divided among up to `splits` programs.  A tile has all columns of its
    positions; a thread has `chunks` accesses per step.  For dx, a program has `apply_fragments` fragments of
    `apply_chunks` accesses per thread.
    """

    num_warps: int
    chunks: int
    apply_chunks: int
    apply_fragments: int
    splits: int

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launches for sums of columns, their reduction to groups, dx, and parameter gradients."""
        sample = call.sample
        partition = make_stream_partition(sample, call.x.element_size(), self, call.n, call.x.device)
        parts = call.allocate_partials(partition.splits)
        sums_of_groups = allocate_statistics(call.x, sample)
        fragment = partition.positions * partition.apply_chunks
        fragments = 1 if partition.has_extra_splits else self.apply_fragments
        programs = cdiv(sample.hw, fragment * fragments)
        epilogue = (call.affine.sample_stride, *call.options.epilogue_arguments)
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
                parts, call.affine, call.out, partition.splits, call.can_start_early, overlaps_previous=True
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
    negative_slope: tl.float32,
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
    """Sum dz and dz * x_hat of each column.  A program sums over one split, which is a part of one sample's
    positions.

    The sums are written to [N, splits, C].  A split is every `splits`th step of CHUNKS tiles; with PREFETCH
    a program prefetches its next step into L2.  Here, dz is the gradient of the affine step's output.
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
    turns, left = count_steps_and_last_positions(split, hw, splits, step_positions)
    whole = turns
    if not WHOLE:
        whole = turns - (left < step_positions).to(tl.int32)
    inside = split.to(tl.int64) * step_positions * c
    base = sample * hw * c
    if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
        if whole > 0:
            # Parameters and statistics are loaded from memory too, and the code below waits for them.
            prefetch_backward_positions(dy_ptr, x_ptr, residual_ptr, base + inside, CHUNKS * tile)
    mean = load_group_statistic(mean_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    rstd = load_group_statistic(rstd_ptr, sample * groups, first_group, groups - 1, group_index, LABELS)
    slope, offset = load_scaled_slope_and_offset(parameters, column, sample * scale_stride + column, there, GAIN)
    scale = slope * rstd
    sums = tl.zeros((LANES, VEC), tl.float32)
    sums_centred = tl.zeros((LANES, VEC), tl.float32)
    for turn in range(0, whole):
        tiles = load_backward_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, 0,
            CHUNKS, True, IDLE, "",
        )  # fmt: skip
        if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
            if turn + 1 < whole:
                prefetch_backward_positions(dy_ptr, x_ptr, residual_ptr, base + inside + stride, CHUNKS * tile)
        sums, sums_centred = accumulate_gradient_positions(
            tiles, mean, scale, offset, sums, sums_centred, sample, inside + at, tile, positions, 0, position,
            seed, dropout_threshold, dropout_scale, negative_slope, True, IDLE, ACTIVATION, DROPOUT, GAIN,
        )  # fmt: skip
        inside += stride
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if whole < turns:
            tiles = load_backward_positions(
                dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, left,
                CHUNKS, False, IDLE, "",
            )  # fmt: skip
            sums, sums_centred = accumulate_gradient_positions(
                tiles, mean, scale, offset, sums, sums_centred, sample, inside + at, tile, positions, left,
                position, seed, dropout_threshold, dropout_scale, negative_slope,
                False, IDLE, ACTIVATION, DROPOUT, GAIN,
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
    negative_slope: tl.float32,
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
    """Write dx of `fragments` consecutive fragments per program; a fragment is CHUNKS tiles of positions.

    The last positions of all samples are processed first, as they were read last.  A kernel that starts next
    can rely on complete sums of columns.
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
        tiles = load_backward_positions(
            dy_ptr, x_ptr, residual_ptr, base + inside, at, position, positions, units, tile, left,
            CHUNKS, WHOLE, IDLE, "evict_first",
        )  # fmt: skip
        outsides = load_masked_positions(
            dresidual_out_ptr, base + inside, at, position, positions, units, tile, left,
            CHUNKS, WHOLE, IDLE, "evict_first",
        )  # fmt: skip
        if PREFETCH:  # noqa: SIM102 (a constexpr and a run-time condition)
            if back + 1 < fragments and start_position <= hw:
                prefetch_backward_positions(
                    dy_ptr, x_ptr, residual_ptr, base + inside - CHUNKS * tile, CHUNKS * tile
                )
        for i in tl.static_range(CHUNKS):
            centred = add_residual_chunk(tiles[1], tiles[2], i) - mean
            dz = backpropagate_scaled_epilogue(
                widen(tiles[0][i]), centred, scale, offset, sample, inside + at + i * tile,
                seed, dropout_threshold, dropout_scale, negative_slope, ACTIVATION, DROPOUT, GAIN,
            )  # fmt: skip
            dx = dz * scale - (centred * factor + constant)
            if len(outsides) > 0:
                dx += widen(outsides[i])
            tl.store(
                dx_ptr + base + inside + i * tile + at, dx.to(dx_ptr.dtype.element_ty),
                mask=make_store_mask(position, positions, units, left, i, WHOLE, IDLE),
                eviction_policy="evict_first",
            )  # fmt: skip
