"""Forward pass that streams channels-last samples twice: moments, their reduction, then y.

No program waits for another.  Tiles are those of `channels_last.stream_positions`; a lane has separate sums for
KEEP runs of its columns, each within one group.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.arguments.arrays import new_workspace
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import add_residual_chunk
from fusednorm.jit.moments import compute_mean_term, convert_moments_to_sums, convert_sums_to_moments, merge_moments
from fusednorm.jit.reductions import sum_pair
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.affine_step import load_slope_and_offset
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig
from fusednorm.ops.group_norm.channels_last.column_blocks import split_into_runs, sum_squares_of_runs
from fusednorm.ops.group_norm.channels_last.stream_partitions import make_stream_partition
from fusednorm.ops.group_norm.channels_last.stream_positions import (
    count_steps_and_last_positions,
    load_clamped_positions,
    locate_lanes,
    make_position_mask,
    make_store_mask,
)
from fusednorm.ops.group_norm.sample_shape import allocate_triple

# Data that is read for its moments is read again for y, so older data should be evicted first.
KEPT = tl.constexpr("evict_last")


@triton.jit
def _accumulate_tile_sums(
    tiles, residuals, pivot, sum_1, sum_2, positions, left, position,
    WHOLE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Add tiles to the running sums of h - pivot and of (h - pivot)^2.  Both are [LANES, SUMS], with a sum for
    each run of columns of a lane.

    A run is adjacent columns of a lane within one group.  `pivot` is [LANES, SUMS]; `tiles` and `residuals`
    are tuples of [LANES, VEC].
    """
    for i in tl.static_range(len(tiles)):
        d = split_into_runs(add_residual_chunk(tiles, residuals, i), SUMS) - pivot[:, :, None]
        if not WHOLE:
            d = tl.where(make_position_mask(position, positions, left, i, WHOLE)[:, :, None], d, 0.0)
        sum_1 += tl.sum(d, 2)
        sum_2 += sum_squares_of_runs(d)
    return sum_1, sum_2


@triton.jit
def divide_small_integers(a, b):
    """Compute a // b for 0 <= a < 2^20 and 1 <= b < 2^20, in fewer instructions than integer division."""
    return ((a.to(tl.float32) + 0.5) * (1.0 / b)).to(tl.int32)


@triton.jit
def count_lane_positions(position, steps, left, positions, chunks):
    """Count the positions that a lane processes over all steps.  `position` is its position in a tile.

    There are `steps` steps of `chunks` tiles of `positions` positions each, with `left` positions in the
    last step.
    """
    return (steps - 1) * chunks + divide_small_integers(tl.maximum(left - position, 0) + positions - 1, positions)


@triton.jit
def index_and_count_runs_by_group(
    units, positions, channels, steps, left, chunks,
    VEC: tl.constexpr, SUMS: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute the indices that sort the lanes' sums by group, and the number of values in each sum.

    A lane has one sum for each run of its columns within one group, [LANES, SUMS].  The indices count in the
    flattened sums and are 1-D.  The numbers of values, in the same order, are [RUNS // ACROSS, GROUPS,
    ACROSS], so that with GROUPS * ACROSS lanes all elements of a thread belong to one group.  The number of
    values is 0 for a run that does not exist.

    Args:
        steps, left, chunks: arguments of `count_lane_positions`.
    """
    WIDTH: tl.constexpr = VEC // SUMS
    element = tl.arange(0, GROUPS * RUNS)
    group = element // ACROSS % GROUPS
    of_group = element // (ACROSS * GROUPS) * ACROSS + element % ACROSS
    group_runs = channels // WIDTH
    position = divide_small_integers(of_group, group_runs)
    run = group * group_runs + (of_group - position * group_runs)
    all_runs = units * SUMS
    present = (position < positions) & (run < all_runs)
    index = tl.where(present, position * all_runs + run, 0)
    counts = tl.where(present, count_lane_positions(position, steps, left, positions, chunks) * WIDTH, 0).to(
        tl.float32
    )
    return index, tl.reshape(counts, (RUNS // ACROSS, GROUPS, ACROSS))


@triton.jit
def merge_moments_by_group(
    pivot, sum_1, sum_2, sorted_runs, units, channels, steps, left, chunks,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Merge all lanes' sums about their pivots, [LANES, SUMS], into the moments of each group, [GROUPS].

    The moments are mean, `rest` and sum of squared deviations.  The merge is that of `merge_moments`, along
    two axes.

    Args:
        sorted_runs: index and counts of `index_and_count_runs_by_group`.
        steps, left, chunks: arguments of `count_lane_positions`.
    """
    index, counts = sorted_runs
    SUMS: tl.constexpr = pivot.shape[1]
    GROUPS: tl.constexpr = counts.shape[1]
    position, _, positions = locate_lanes(units, LANES, VEC)
    count = (count_lane_positions(position, steps, left, positions, chunks) * (VEC // SUMS)).to(tl.float32)
    distance = sum_1 / tl.maximum(count, 1.0)
    means = pivot.to(tl.int32, bitcast=True).to(tl.int64)
    rests = distance.to(tl.int32, bitcast=True).to(tl.int64)
    # Both values in one exchange through shared memory.
    both = tl.gather(tl.reshape((means << 32) | (rests & 0xFFFFFFFF), (LANES * SUMS,)), index, 0)
    squares = tl.gather(tl.reshape(sum_2 - sum_1 * distance, (LANES * SUMS,)), index, 0)
    present = counts > 0.0
    both = tl.where(present, tl.reshape(both, counts.shape), 0)
    means = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    rests = both.to(tl.int32).to(tl.float32, bitcast=True)
    squares = tl.where(present, tl.reshape(squares, counts.shape), 0.0)
    values = ((steps - 1) * (positions * chunks) + left).to(tl.float32) * channels
    share = tl.sum(compute_mean_term(counts, means, rests, values), 0, keep_dims=True)
    rough = tl.sum(share, 2, keep_dims=True)
    rest, square = convert_moments_to_sums(rough, counts, means, rests, squares)
    rest, square = sum_pair(rest, square, 0)
    rest, square = sum_pair(rest, square, 2)
    rest, square = convert_sums_to_moments(values, rest, square)
    return tl.reshape(rough, (GROUPS,)), tl.reshape(rest, (GROUPS,)), tl.reshape(square, (GROUPS,))


@triton.jit
def compute_split_moments(
    x_ptr, residual_ptr, sample, split, splits, hw, units, channels,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
    SUMS: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Read one split of a sample, and compute the moments of each group over this split, [GROUPS].

    A split is every `splits`th step of CHUNKS tiles.  The moments are mean, `rest` and sum of squared
    deviations.

    The programs of a sample read adjacent steps at the same time, so that simultaneous reads are close in
    memory.
    """
    c = units * VEC
    width: tl.constexpr = VEC // SUMS
    position, column, positions = locate_lanes(units, LANES, VEC)
    step = positions * CHUNKS
    steps, left = count_steps_and_last_positions(split, hw, splits, step)
    # All iterations are whole, except the last one of the last program.
    whole = steps
    if not WHOLE:
        whole = steps - (left < step).to(tl.int32)
    start = (sample * hw + split.to(tl.int64) * step) * c
    stride = (splits * step).to(tl.int64) * c

    ACROSS: tl.constexpr = min(RUNS, max(1, min(32, LANES // GROUPS)))
    where_in_tile = index_and_count_runs_by_group(
        units, positions, channels, steps, left, CHUNKS, VEC, SUMS, GROUPS, RUNS, ACROSS
    )
    # The pivots are from the whole first step: separate loads for them would delay all others.
    first_left = tl.minimum(hw - split * step, step)
    tiles = load_clamped_positions(x_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    residuals = load_clamped_positions(
        residual_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT
    )
    pivot = tl.sum(split_into_runs(add_residual_chunk(tiles, residuals, 0), SUMS), 2) * (1.0 / width)
    zero = tl.zeros(pivot.shape, tl.float32)
    sum_1, sum_2 = _accumulate_tile_sums(
        tiles, residuals, pivot, zero, zero, positions, first_left, position, WHOLE, SUMS
    )
    for _ in range(1, whole):
        start += stride
        tiles = load_clamped_positions(x_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        residuals = load_clamped_positions(
            residual_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT
        )
        sum_1, sum_2 = _accumulate_tile_sums(
            tiles, residuals, pivot, sum_1, sum_2, positions, 0, position, True, SUMS
        )
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if steps > 1 and whole < steps:
            start += stride
            tiles = load_clamped_positions(x_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT)
            residuals = load_clamped_positions(
                residual_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT
            )
            sum_1, sum_2 = _accumulate_tile_sums(
                tiles, residuals, pivot, sum_1, sum_2, positions, left, position, False, SUMS
            )

    return merge_moments_by_group(
        pivot, sum_1, sum_2, where_in_tile, units, channels, steps, left, CHUNKS, LANES, VEC
    )


@triton.jit
def load_sample_fragment(
    ptr, sample, first, hw, units, left,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS tiles [LANES, VEC] of all columns, from position `first` of a sample on; () if ptr is None.

    `left` positions exist from there on.
    """
    position, column, positions = locate_lanes(units, LANES, VEC)
    c = units * VEC
    start = (sample * hw + first) * c
    return load_clamped_positions(ptr, start, column, c, position, positions, left, CHUNKS, WHOLE, "")


@triton.jit
def store_normalised_sample_fragment(
    tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset, sample, first, hw, units, left, epilogue,
    VEC: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Normalise the tiles from `load_sample_fragment`, apply activation and dropout, and store y and h.

    y is act((h - mean) * slope + offset); h is x + residual.

    Args:
        mean, slope, offset: values for each lane's columns, [LANES, VEC].
        epilogue: seed, threshold and scale of dropout, and the negative slope.
    """
    position, column, positions = locate_lanes(units, LANES, VEC)
    c = units * VEC
    at = position * c + column
    start = (sample * hw + first) * c
    tile = positions * c
    for i in tl.static_range(len(tiles)):
        mask = make_store_mask(position, positions, units, left, i, WHOLE, IDLE)
        h = add_residual_chunk(tiles, residuals, i)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + start + i * tile + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = activate_for_dtype((h - mean) * slope + offset, epilogue[3], y_ptr.dtype.element_ty, ACTIVATION)
        if DROPOUT:
            keep = compute_keep_mask(epilogue[0], sample, first * c + i * tile + at, epilogue[1])
            y = tl.where(keep, y * epilogue[2], 0.0)
        tl.store(y_ptr + start + i * tile + at, y.to(y_ptr.dtype.element_ty), mask=mask)


_REDUCE_CHANNELS = 512
"""The most channels for which a reduction writes coefficients at a time."""

_REDUCE_WARPS = 4
"""Warps of a program that reduces a group's moments; for few moments one warp is faster: it needs no barrier."""


@dataclass(frozen=True, slots=True)
class ForwardSampleStream(GroupNormForwardConfig):
    """A configuration that reads each channels-last sample twice: for moments of its groups, then for y.

    For moments, a sample is divided among up to `splits` programs; a thread has `chunks` accesses per step.
    For y, a program has one fragment of `apply_chunks` accesses per thread.
    """

    num_warps: int
    chunks: int
    apply_chunks: int
    splits: int

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan three launches: for the moments of each split of a sample, for the coefficients of each
        channel, and for y.
        """
        sample, x, out = call.sample, call.x, call.out
        partition = make_stream_partition(sample, x.element_size(), self, call.n, x.device)
        parts = allocate_triple(x, call.n, partition.splits, sample.groups)
        coefficients = new_workspace(x, 3, call.n, sample.c)
        fragment = partition.positions * partition.apply_chunks
        moments = (
            x, call.residual, *parts, sample.hw, partition.position_vectors, sample.groups, sample.group_channels,
            partition.splits
        )  # fmt: skip
        reduce = (
            *parts, *call.tensors[2:6], out.mean, out.rstd, coefficients, sample.hw, sample.groups,
            sample.group_channels, partition.splits, partition.step_positions, call.affine.sample_stride,
            call.n * sample.c, call.options.eps,
        )  # fmt: skip
        apply = (
            x, call.residual, out.y, out.residual_out, coefficients, sample.hw, partition.position_vectors, call.n,
            *call.options.epilogue_arguments,
        )  # fmt: skip
        return [
            Launch(
                group_norm_nhwc_forward_stream_moments_kernel,
                (call.n * partition.splits,),
                moments,
                {
                    **partition.make_tile_options(self.num_warps),
                    **partition.make_moment_options(sample),
                    "CHUNKS": self.chunks,
                    "WHOLE": sample.hw % partition.step_positions == 0,
                    "EARLY": call.can_start_early,
                },
            ),
            Launch(
                group_norm_nhwc_forward_stream_reduce_kernel,
                (call.n * sample.groups,),
                reduce,
                {
                    "SPLITS": next_power_of_2(partition.splits),
                    "BLOCK_CHANNELS": min(_REDUCE_CHANNELS, next_power_of_2(sample.group_channels)),
                    "num_warps": 1 if partition.has_extra_splits else _REDUCE_WARPS,
                    **make_early_options(call.can_start_early),
                },
            ),
            Launch(
                group_norm_nhwc_forward_stream_apply_kernel,
                (call.n * cdiv(sample.hw, fragment),),
                apply,
                {
                    **partition.make_tile_options(self.num_warps),
                    "IDLE": partition.has_idle_lanes,
                    "CHUNKS": partition.apply_chunks,
                    "WHOLE": sample.hw % fragment == 0,
                    **make_early_options(call.can_start_early),
                    **call.options.constexprs,
                },
            ),
        ]


@triton.jit(do_not_specialize=["hw", "units", "groups", "channels", "splits"])
def group_norm_nhwc_forward_stream_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    hw: tl.int32,
    units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    RUNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute partial moments of each group.  Each program has one split of a sample.

    The moments are written to [N, splits, groups]: mean, its rounding error (rest), and sum of squared
    deviations.
    """
    allow_next_launch(EARLY)
    program = tl.program_id(0).to(tl.int64)
    mean, rest, square = compute_split_moments(
        x_ptr, residual_ptr, program // splits, (program % splits).to(tl.int32), splits, hw, units, channels,
        VEC, LANES, CHUNKS, WHOLE, SUMS, GROUPS, RUNS,
    )  # fmt: skip
    group = tl.arange(0, GROUPS)
    tl.store(mean_part_ptr + program * groups + group, mean, mask=group < groups)
    tl.store(rest_part_ptr + program * groups + group, rest, mask=group < groups)
    tl.store(square_part_ptr + program * groups + group, square, mask=group < groups)


@triton.jit(do_not_specialize=["hw", "groups", "channels", "splits", "step", "scale_stride", "columns"])
def group_norm_nhwc_forward_stream_reduce_kernel(
    mean_part_ptr,
    rest_part_ptr,
    square_part_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    mean_ptr,
    rstd_ptr,
    coefficient_ptr,
    hw: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    step: tl.int32,
    scale_stride: tl.int64,
    columns: tl.int64,
    eps: tl.float32,
    SPLITS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the moments of all splits of a group; each program has one group.  Write the group's statistics
    and the coefficients of its channels.

    The three coefficients have `columns` columns each; y is act((h - first) * second + third).
    """
    allow_next_launch(EARLY)
    program = tl.program_id(0)
    sample = (program // groups).to(tl.int64)
    group = program % groups
    split = tl.arange(0, SPLITS)
    present = split < splits
    turns, left = count_steps_and_last_positions(split, hw, splits, step)
    counts = tl.where(present, (turns - 1) * step + left, 0).to(tl.float32) * channels
    total = hw.to(tl.float32) * channels
    at = (sample * splits + split) * groups + group
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    slope, offset = _load_group_slope_and_offset(
        parameters, sample, group, channels, 0, scale_stride, BLOCK_CHANNELS
    )
    await_previous_launch(EARLY)
    means = tl.load(mean_part_ptr + at, mask=present, other=0.0)
    rests = tl.load(rest_part_ptr + at, mask=present, other=0.0)
    squares = tl.load(square_part_ptr + at, mask=present, other=0.0)
    mean, rest, square = merge_moments(counts, means, rests, squares, total, 0)
    rstd = approximate_rsqrt(square / total + eps)
    if mean_ptr is not None:
        here = program + tl.arange(0, 1)
        tl.store(mean_ptr + here, mean + rest)
        tl.store(rstd_ptr + here, rstd)
    coefficients = coefficient_ptr + sample * (groups * channels) + group * channels
    for start in range(0, channels, BLOCK_CHANNELS):
        if start > 0:
            slope, offset = _load_group_slope_and_offset(
                parameters, sample, group, channels, start, scale_stride, BLOCK_CHANNELS
            )
        within = start + tl.arange(0, BLOCK_CHANNELS)
        of_group = within < channels
        tl.store(coefficients + within, mean + tl.zeros((BLOCK_CHANNELS,), tl.float32), mask=of_group)
        tl.store(coefficients + columns + within, rstd * slope, mask=of_group)
        tl.store(coefficients + 2 * columns + within, offset - rest * (rstd * slope), mask=of_group)


@triton.jit
def _load_group_slope_and_offset(
    parameters, sample, group, channels, start, scale_stride, BLOCK_CHANNELS: tl.constexpr
):
    """Load slope and offset of the affine step for a group's channels from `start` on, [BLOCK_CHANNELS] each."""
    within = start + tl.arange(0, BLOCK_CHANNELS)
    channel = group * channels + within
    slope, offset = load_slope_and_offset(parameters, channel, sample * scale_stride + channel, within < channels)
    return slope + tl.zeros((BLOCK_CHANNELS,), tl.float32), offset + tl.zeros((BLOCK_CHANNELS,), tl.float32)


@triton.jit(do_not_specialize=["hw", "units", "samples", "seed", "dropout_threshold"])
def group_norm_nhwc_forward_stream_apply_kernel(
    x_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    coefficient_ptr,
    hw: tl.int32,
    units: tl.int32,
    samples: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write y.  Each program handles one fragment, which is CHUNKS tiles of a sample's positions.

    The last positions of all samples are processed first, as they were read last.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program % samples).to(tl.int64)
    positions = LANES // units
    c = units * VEC
    first = (program // samples).to(tl.int64) * (positions * CHUNKS)
    left = tl.minimum(hw - first, positions * CHUNKS).to(tl.int32)
    tiles = load_sample_fragment(x_ptr, sample, first, hw, units, left, VEC, LANES, CHUNKS, WHOLE)
    residuals = load_sample_fragment(residual_ptr, sample, first, hw, units, left, VEC, LANES, CHUNKS, WHOLE)
    await_previous_launch(EARLY)
    _, column, _ = locate_lanes(units, LANES, VEC)
    coefficients = coefficient_ptr + sample * c + column
    columns = samples.to(tl.int64) * c
    mean = tl.load(coefficients)
    slope = tl.load(coefficients + columns)
    offset = tl.load(coefficients + 2 * columns)
    store_normalised_sample_fragment(
        tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset,
        sample, first, hw, units, left, (seed, dropout_threshold, dropout_scale, negative_slope),
        VEC, LANES, WHOLE, IDLE, ACTIVATION, DROPOUT,
    )  # fmt: skip
