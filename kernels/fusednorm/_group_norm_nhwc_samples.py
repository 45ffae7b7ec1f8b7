"""Parts of channels-last samples: their moments by group, and y of their pieces.

Tiles are those of `_group_norm_nhwc_positions`; a lane's sums are kept apart for KEEP runs of its columns, each of
which lies in one group.
"""

import triton
import triton.language as tl

from fusednorm._group_norm_nhwc_pieces import runs_of
from fusednorm._group_norm_nhwc_positions import load_positions, places, position_mask, stored_mask, turns_of
from fusednorm._reductions import rounded_product, sum_pair
from fusednorm._row_pieces import chunk_of
from fusednorm.epilogue import activate_to, dropout_keep

# What is read for its moments is read again for y: rather let what was there before go.
KEPT = tl.constexpr("evict_last")


@triton.jit
def _add_tiles(
    tiles, residuals, pivot, sum_1, sum_2, positions, left, position,
    WHOLE: tl.constexpr, KEEP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums about the pivot of each run of columns, [LANES, KEEP], and of squares, with those of the tiles."""
    for i in tl.static_range(len(tiles)):
        d = runs_of(chunk_of(tiles, residuals, i, FAST), KEEP) - pivot[:, :, None]
        if not WHOLE:
            d = tl.where(position_mask(position, positions, left, i, WHOLE)[:, :, None], d, 0.0)
        sum_1 += tl.sum(d, 2)
        sum_2 += tl.sum(d * d, 2)
    return sum_1, sum_2


@triton.jit
def positions_taken(place, turns, left, positions, chunks):
    """Positions that the lanes of place `place` of a tile of `positions` take in all turns."""
    return (turns - 1) * chunks + (tl.maximum(left - place, 0) + positions - 1) // positions


@triton.jit
def in_groups(value, units, positions, channels, GROUPS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """What lanes hold of each run of columns, [LANES, KEEP], by group: [GROUPS, RUNS], positions apart.

    Also the place of a run's position in a tile, and whether there is such a run.
    """
    element = tl.arange(0, GROUPS * RUNS)
    group = element // RUNS
    of_group = element % RUNS
    group_runs = channels // WIDTH
    place = of_group // group_runs
    run = group * group_runs + of_group % group_runs
    columns = units * (value.shape[1] * WIDTH)
    present = (place < positions) & (run * WIDTH < columns)
    index = tl.where(present, place * (columns // WIDTH) + run, 0)
    lanes: tl.constexpr = value.shape[0] * value.shape[1]
    found = tl.gather(tl.reshape(value, (lanes,)), index, 0)
    return tl.reshape(found, (GROUPS, RUNS)), tl.reshape(place, (GROUPS, RUNS)), tl.reshape(present, (GROUPS, RUNS))


@triton.jit
def moments_by_group(
    pivot, sum_1, sum_2, units, channels, turns, left, chunks, WIDTH: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations, [GROUPS], of what lanes summed about their pivots, [LANES, KEEP] each.

    Args:
        turns, left, chunks: as `positions_taken` takes them.
        WIDTH: columns of a run.
    """
    position, _, positions = places(units, LANES, VEC)
    count = (positions_taken(position, turns, left, positions, chunks) * WIDTH).to(tl.float32)
    distance = sum_1 / tl.maximum(count, 1.0)
    means, place, present = in_groups(pivot + distance, units, positions, channels, GROUPS, RUNS, WIDTH)
    squares, _, _ = in_groups(sum_2 - sum_1 * distance, units, positions, channels, GROUPS, RUNS, WIDTH)
    values = ((turns - 1) * (positions * chunks) + left).to(tl.float32) * channels
    counts = tl.where(present, positions_taken(place, turns, left, positions, chunks) * WIDTH, 0).to(tl.float32)
    means = tl.where(counts > 0.0, means, 0.0)
    rough = tl.sum(rounded_product(counts / values, means, FAST), 1, keep_dims=True)
    delta = means - rough
    weighted = counts * delta
    square = tl.where(present, squares + weighted * delta, 0.0)
    rest, square = sum_pair(weighted, square, 1, FAST)
    rest = rest / values
    square = square - values * rest * rest
    # maximum would lose a NaN.
    square = tl.where(square < 0.0, 0.0, square)
    return tl.reshape(rough + rest, (GROUPS,)), tl.reshape(square, (GROUPS,))


@triton.jit
def split_moments(
    x_ptr, residual_ptr, sample, split, splits, hw, units, channels,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
    KEEP: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations, [GROUPS], of every `splits`th step of CHUNKS tiles of a sample.

    All programs of a sample walk it side by side, so that what memory is asked for at a time lies together.
    """
    c = units * VEC
    width: tl.constexpr = VEC // KEEP
    position, column, positions = places(units, LANES, VEC)
    step = positions * CHUNKS
    turns, left = turns_of(split, hw, splits, step)
    # All turns are whole but the last of the last program.
    whole = turns
    if not WHOLE:
        whole = turns - (left < step).to(tl.int32)
    start = (sample * hw + split.to(tl.int64) * step) * c
    stride = (splits * step).to(tl.int64) * c

    # The first step gives the pivots: loads of one would come before all others.
    first_left = tl.minimum(hw - split * step, step)
    tiles = load_positions(x_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    residuals = load_positions(residual_ptr, start, column, c, position, positions, first_left, CHUNKS, WHOLE, KEPT)
    pivot = tl.sum(runs_of(chunk_of(tiles, residuals, 0, FAST), KEEP), 2) * (1.0 / width)
    nought = tl.zeros(pivot.shape, tl.float32)
    sum_1, sum_2 = _add_tiles(
        tiles, residuals, pivot, nought, nought, positions, first_left, position, WHOLE, KEEP, FAST
    )
    for _ in range(1, whole):
        start += stride
        tiles = load_positions(x_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        residuals = load_positions(residual_ptr, start, column, c, position, positions, 0, CHUNKS, True, KEPT)
        sum_1, sum_2 = _add_tiles(tiles, residuals, pivot, sum_1, sum_2, positions, 0, position, True, KEEP, FAST)
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if turns > 1 and whole < turns:
            start += stride
            tiles = load_positions(x_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT)
            residuals = load_positions(
                residual_ptr, start, column, c, position, positions, left, CHUNKS, False, KEPT
            )
            sum_1, sum_2 = _add_tiles(
                tiles, residuals, pivot, sum_1, sum_2, positions, left, position, False, KEEP, FAST
            )

    return moments_by_group(
        pivot, sum_1, sum_2, units, channels, turns, left, CHUNKS, width, LANES, VEC, GROUPS, RUNS, FAST
    )


@triton.jit
def load_sample_piece(
    ptr, sample, first, hw, units, left,
    VEC: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles from position `first` of a sample on, `left` of which exist; none where ptr is None."""
    position, column, positions = places(units, LANES, VEC)
    c = units * VEC
    start = (sample * hw + first) * c
    return load_positions(ptr, start, column, c, position, positions, left, CHUNKS, WHOLE, "")


@triton.jit
def write_sample_piece(
    tiles, residuals, y_ptr, residual_out_ptr, mean, slope, offset, sample, first, hw, units, left, dropout,
    VEC: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y = act((h - mean) * slope + offset), and h, of what `load_sample_piece` loaded.

    Args:
        mean, slope, offset: of each lane's columns, [LANES, VEC].
        dropout: seed, threshold and scale.
    """
    position, column, positions = places(units, LANES, VEC)
    c = units * VEC
    at = position * c + column
    start = (sample * hw + first) * c
    tile = positions * c
    for i in tl.static_range(len(tiles)):
        mask = stored_mask(position, positions, units, left, i, WHOLE, IDLE)
        h = chunk_of(tiles, residuals, i, FAST)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + start + i * tile + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = activate_to((h - mean) * slope + offset, y_ptr.dtype.element_ty, ACTIVATION, FAST)
        if DROPOUT:
            keep = dropout_keep(dropout[0], sample, first * c + i * tile + at, dropout[1])
            y = tl.where(keep, y * dropout[2], 0.0)
        tl.store(y_ptr + start + i * tile + at, y.to(y_ptr.dtype.element_ty), mask=mask)
