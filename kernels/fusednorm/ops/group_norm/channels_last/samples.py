"""Parts of channels-last samples: their moments by group, and y of their pieces.

Tiles are those of `channels_last.positions`; a lane has separate sums for KEEP runs of its columns, each within one
group.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate_to, dropout_keep
from fusednorm.jit.loads import chunk_of
from fusednorm.jit.moments import about_mean, about_rough_mean, share_of_mean
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.channels_last.blocks import runs_of, sum_squares_of_runs
from fusednorm.ops.group_norm.channels_last.positions import (
    load_positions,
    places,
    position_mask,
    stored_mask,
    turns_of,
)

# Data that is read for its moments is read again for y, so older data should be evicted first.
KEPT = tl.constexpr("evict_last")


@triton.jit
def _add_tiles(
    tiles, residuals, pivot, sum_1, sum_2, positions, left, position,
    WHOLE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Add the tiles to the sums about the pivot of each run of columns, [LANES, KEEP], and to those of squares."""
    for i in tl.static_range(len(tiles)):
        d = runs_of(chunk_of(tiles, residuals, i), KEEP) - pivot[:, :, None]
        if not WHOLE:
            d = tl.where(position_mask(position, positions, left, i, WHOLE)[:, :, None], d, 0.0)
        sum_1 += tl.sum(d, 2)
        sum_2 += sum_squares_of_runs(d)
    return sum_1, sum_2


@triton.jit
def small_quotient(a, b):
    """Compute a // b for 0 <= a < 2**20 and 1 <= b < 2**20, in fewer instructions than integer division."""
    return ((a.to(tl.float32) + 0.5) * (1.0 / b)).to(tl.int32)


@triton.jit
def positions_taken(place, turns, left, positions, chunks):
    """Compute the number of positions of the lanes at position `place` of a tile, over all iterations."""
    return (turns - 1) * chunks + small_quotient(tl.maximum(left - place, 0) + positions - 1, positions)


@triton.jit
def groups_of_tile(
    units, positions, channels, turns, left, chunks,
    VEC: tl.constexpr, KEEP: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute the indices that sort the lanes' runs of columns, [LANES, KEEP], by group.

    Also returns the number of values of each run.

    Both are [RUNS // ACROSS, GROUPS, ACROSS], so that with GROUPS * ACROSS lanes all elements of a thread belong to
    one group.  The number of values is 0 for a run that does not exist.

    Args:
        turns, left, chunks: arguments of `positions_taken`.
    """
    WIDTH: tl.constexpr = VEC // KEEP
    element = tl.arange(0, GROUPS * RUNS)
    group = element // ACROSS % GROUPS
    of_group = element // (ACROSS * GROUPS) * ACROSS + element % ACROSS
    group_runs = channels // WIDTH
    place = small_quotient(of_group, group_runs)
    run = group * group_runs + (of_group - place * group_runs)
    all_runs = units * KEEP
    present = (place < positions) & (run < all_runs)
    index = tl.where(present, place * all_runs + run, 0)
    counts = tl.where(present, positions_taken(place, turns, left, positions, chunks) * WIDTH, 0).to(tl.float32)
    return index, tl.reshape(counts, (RUNS // ACROSS, GROUPS, ACROSS))


@triton.jit
def moments_by_group(
    pivot, sum_1, sum_2, where_in_tile, units, channels, turns, left, chunks,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Compute the moments of each group, [GROUPS], from the lanes' sums about their pivots, [LANES, KEEP].

    The moments are mean, `rest` and sum of squared deviations.

    It is `merge_moments` along two axes.

    Args:
        where_in_tile: index and counts of `groups_of_tile`.
        turns, left, chunks: arguments of `positions_taken`.
    """
    index, counts = where_in_tile
    KEEP: tl.constexpr = pivot.shape[1]
    GROUPS: tl.constexpr = counts.shape[1]
    position, _, positions = places(units, LANES, VEC)
    count = (positions_taken(position, turns, left, positions, chunks) * (VEC // KEEP)).to(tl.float32)
    distance = sum_1 / tl.maximum(count, 1.0)
    means = pivot.to(tl.int32, bitcast=True).to(tl.int64)
    rests = distance.to(tl.int32, bitcast=True).to(tl.int64)
    # Both values in one exchange through shared memory.
    both = tl.gather(tl.reshape((means << 32) | (rests & 0xFFFFFFFF), (LANES * KEEP,)), index, 0)
    squares = tl.gather(tl.reshape(sum_2 - sum_1 * distance, (LANES * KEEP,)), index, 0)
    present = counts > 0.0
    both = tl.where(present, tl.reshape(both, counts.shape), 0)
    means = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    rests = both.to(tl.int32).to(tl.float32, bitcast=True)
    squares = tl.where(present, tl.reshape(squares, counts.shape), 0.0)
    values = ((turns - 1) * (positions * chunks) + left).to(tl.float32) * channels
    share = tl.sum(share_of_mean(counts, means, rests, values), 0, keep_dims=True)
    rough = tl.sum(share, 2, keep_dims=True)
    rest, square = about_rough_mean(rough, counts, means, rests, squares)
    rest, square = sum_pair(rest, square, 0)
    rest, square = sum_pair(rest, square, 2)
    rest, square = about_mean(values, rest, square)
    return tl.reshape(rough, (GROUPS,)), tl.reshape(rest, (GROUPS,)), tl.reshape(square, (GROUPS,))


@triton.jit
def split_moments(
    x_ptr, residual_ptr, sample, split, splits, hw, units, channels,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
    KEEP: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Compute the moments of each group, [GROUPS], of every `splits`th step of CHUNKS tiles of a sample.

    The moments are mean, `rest` and sum of squared deviations.

    The programs of a sample read adjacent steps at the same time, so that simultaneous reads are close in memory.
    """
    c = units * VEC
    width: tl.constexpr = VEC // KEEP
    position, column, positions = places(units, LANES, VEC)
    step = positions * CHUNKS
    turns, left = turns_of(split, hw, splits, step)
    # All iterations are whole, except the last one of the last program.
    whole = turns
    if not WHOLE:
        whole = turns - (left < step).to(tl.int32)
    start = (sample * hw + split.to(tl.int64) * step) * c
    stride = (splits * step).to(tl.int64) * c

    ACROSS: tl.constexpr = min(RUNS, max(1, min(32, LANES // GROUPS)))
    where_in_tile = groups_of_tile(units, positions, channels, turns, left, CHUNKS, VEC, KEEP, GROUPS, RUNS, ACROSS)
    # The pivots are from the whole first step: separate loads for them would delay all others.
    first_left = tl.minimum(hw - split * step, step)
    tiles = load_positions(x_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    residuals = load_positions(residual_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    pivot = tl.sum(runs_of(chunk_of(tiles, residuals, 0), KEEP), 2) * (1.0 / width)
    zero = tl.zeros(pivot.shape, tl.float32)
    sum_1, sum_2 = _add_tiles(tiles, residuals, pivot, zero, zero, positions, first_left, position, WHOLE, KEEP)
    for _ in range(1, whole):
        start += stride
        tiles = load_positions(x_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        residuals = load_positions(residual_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        sum_1, sum_2 = _add_tiles(tiles, residuals, pivot, sum_1, sum_2, positions, 0, position, True, KEEP)
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if turns > 1 and whole < turns:
            start += stride
            tiles = load_positions(x_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT)
            residuals = load_positions(
                residual_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT
            )
            sum_1, sum_2 = _add_tiles(tiles, residuals, pivot, sum_1, sum_2, positions, left, position, False, KEEP)

    return moments_by_group(pivot, sum_1, sum_2, where_in_tile, units, channels, turns, left, CHUNKS, LANES, VEC)


@triton.jit
def load_sample_piece(
    ptr, sample, first, hw, units, left,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS tiles from position `first` of a sample on; `left` positions exist; () if ptr is None."""
    position, column, positions = places(units, LANES, VEC)
    c = units * VEC
    start = (sample * hw + first) * c
    return load_positions(ptr, start, column, c, position, positions, left, CHUNKS, WHOLE, "")


@triton.jit
def write_sample_piece(
    tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset, sample, first, hw, units, left, dropout,
    VEC: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write y = act((h - mean) * slope + offset), and h, of the tiles from `load_sample_piece`.

    Args:
        mean, slope, offset: values for each lane's columns, [LANES, VEC].
        dropout: seed, threshold and scale.
    """
    position, column, positions = places(units, LANES, VEC)
    c = units * VEC
    at = position * c + column
    start = (sample * hw + first) * c
    tile = positions * c
    for i in tl.static_range(len(tiles)):
        mask = stored_mask(position, positions, units, left, i, WHOLE, IDLE)
        h = chunk_of(tiles, residuals, i)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + start + i * tile + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = activate_to((h - mean) * slope + offset, y_ptr.dtype.element_ty, ACTIVATION)
        if DROPOUT:
            keep = dropout_keep(dropout[0], sample, first * c + i * tile + at, dropout[1])
            y = tl.where(keep, y * dropout[2], 0.0)
        tl.store(y_ptr + start + i * tile + at, y.to(y_ptr.dtype.element_ty), mask=mask)
