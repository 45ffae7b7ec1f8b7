"""Parts of channels-last samples: their moments by group, and y of their fragments.

Tiles are those of `channels_last.positions`; a lane has SUMS sums, one for each run of its columns, each within one
group.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import add_residual_chunk
from fusednorm.jit.moments import compute_mean_term, convert_moments_to_sums, convert_sums_to_moments
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.channels_last.column_blocks import split_into_runs, sum_squares_of_runs
from fusednorm.ops.group_norm.channels_last.stream_positions import (
    count_split_steps,
    load_positions,
    locate_lanes,
    make_position_mask,
    make_store_mask,
)

# Data that is read for its moments is read again for y, so older data should be evicted first.
KEPT = tl.constexpr("evict_last")


@triton.jit
def _accumulate_tile_sums(
    tiles, residuals, pivot, sum_1, sum_2, positions, left, position,
    WHOLE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Add tiles to each run's sums of h - pivot and of (h - pivot)^2, [LANES, SUMS] each.

    `pivot` is [LANES, SUMS]; `tiles` and `residuals` are tuples of [LANES, VEC].
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
    """Count the positions that a lane processes over all steps; `position` is the lane's position in a tile.

    There are `steps` steps of `chunks` tiles of `positions` positions each, with `left` positions in the last step.
    """
    return (steps - 1) * chunks + divide_small_integers(tl.maximum(left - position, 0) + positions - 1, positions)


@triton.jit
def index_runs_by_group(
    units, positions, channels, steps, left, chunks,
    VEC: tl.constexpr, SUMS: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute the indices that sort the lanes' runs of columns, flattened from [LANES, SUMS], by group.

    Also returns the number of values of each run.  The former are 1-D, the latter, in the same order, are [RUNS //
    ACROSS, GROUPS, ACROSS], so that with GROUPS * ACROSS lanes all elements of a thread belong to one group.  The
    number of values is 0 for a run that does not exist.

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
    pivot, sum_1, sum_2, where_in_tile, units, channels, steps, left, chunks,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Merge the lanes' sums about their pivots, [LANES, SUMS], into the moments of each group, [GROUPS].

    The moments are mean, `rest` and sum of squared deviations.  The merge is that of `merge_moments`, along two
    axes.

    Args:
        where_in_tile: index and counts of `index_runs_by_group`.
        steps, left, chunks: arguments of `count_lane_positions`.
    """
    index, counts = where_in_tile
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
    """Compute the moments of each group, [GROUPS], over one split of a sample.

    A split is every `splits`th step of CHUNKS tiles.  The moments are mean, `rest` and sum of squared deviations.

    The programs of a sample read adjacent steps at the same time, so that simultaneous reads are close in memory.
    """
    c = units * VEC
    width: tl.constexpr = VEC // SUMS
    position, column, positions = locate_lanes(units, LANES, VEC)
    step = positions * CHUNKS
    steps, left = count_split_steps(split, hw, splits, step)
    # All iterations are whole, except the last one of the last program.
    whole = steps
    if not WHOLE:
        whole = steps - (left < step).to(tl.int32)
    start = (sample * hw + split.to(tl.int64) * step) * c
    stride = (splits * step).to(tl.int64) * c

    ACROSS: tl.constexpr = min(RUNS, max(1, min(32, LANES // GROUPS)))
    where_in_tile = index_runs_by_group(
        units, positions, channels, steps, left, CHUNKS, VEC, SUMS, GROUPS, RUNS, ACROSS
    )
    # The pivots are from the whole first step: separate loads for them would delay all others.
    first_left = tl.minimum(hw - split * step, step)
    tiles = load_positions(x_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    residuals = load_positions(residual_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    pivot = tl.sum(split_into_runs(add_residual_chunk(tiles, residuals, 0), SUMS), 2) * (1.0 / width)
    zero = tl.zeros(pivot.shape, tl.float32)
    sum_1, sum_2 = _accumulate_tile_sums(
        tiles, residuals, pivot, zero, zero, positions, first_left, position, WHOLE, SUMS
    )
    for _ in range(1, whole):
        start += stride
        tiles = load_positions(x_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        residuals = load_positions(residual_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        sum_1, sum_2 = _accumulate_tile_sums(
            tiles, residuals, pivot, sum_1, sum_2, positions, 0, position, True, SUMS
        )
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if steps > 1 and whole < steps:
            start += stride
            tiles = load_positions(x_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT)
            residuals = load_positions(
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
    """Load CHUNKS tiles [LANES, VEC] from position `first` of a sample on; () if ptr is None.

    `left` positions exist from there on.
    """
    position, column, positions = locate_lanes(units, LANES, VEC)
    c = units * VEC
    start = (sample * hw + first) * c
    return load_positions(ptr, start, column, c, position, positions, left, CHUNKS, WHOLE, "")


@triton.jit
def store_normalised_sample_fragment(
    tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset, sample, first, hw, units, left, dropout,
    VEC: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute y = act((h - mean) * slope + offset) of the tiles from `load_sample_fragment`, and store y and h.

    Args:
        mean, slope, offset: values for each lane's columns, [LANES, VEC].
        dropout: seed, threshold and scale.
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
        y = activate_for_dtype((h - mean) * slope + offset, y_ptr.dtype.element_ty, ACTIVATION)
        if DROPOUT:
            keep = compute_keep_mask(dropout[0], sample, first * c + i * tile + at, dropout[1])
            y = tl.where(keep, y * dropout[2], 0.0)
        tl.store(y_ptr + start + i * tile + at, y.to(y_ptr.dtype.element_ty), mask=mask)
