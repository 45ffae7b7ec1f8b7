"""Forward kernels of GroupNorm that stream channels-last samples twice: moments, their fold, then y.

Tiles are those of `_group_norm_nhwc_positions`; a lane's sums are kept apart for KEEP runs of its columns, each of
which lies in one group.  No program waits for another.
"""

import triton
import triton.language as tl

from fusednorm._early_start import await_previous, let_next_start
from fusednorm._group_norm_affine import load_masked_affine
from fusednorm._group_norm_nhwc_positions import load_positions, places, position_mask
from fusednorm._reductions import rounded_product, sum_pair
from fusednorm._row_pieces import chunk_of
from fusednorm.epilogue import activate_to, dropout_keep


@triton.jit
def _add_tiles(
    tiles, residuals, pivot, sum_1, sum_2, positions, left, position,
    WHOLE: tl.constexpr, IDLE: tl.constexpr, KEEP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums about the pivot of each run of columns, [LANES, KEEP], and of squares, with those of the tiles."""
    for i in tl.static_range(len(tiles)):
        d = _runs(chunk_of(tiles, residuals, i, FAST), KEEP) - pivot[:, :, None]
        # Idle lanes hold zeros about a pivot of zero.
        if not WHOLE:
            d = tl.where(position_mask(position, positions, left, i, WHOLE, IDLE)[:, :, None], d, 0.0)
        sum_1 += tl.sum(d, 2)
        sum_2 += tl.sum(d * d, 2)
    return sum_1, sum_2


@triton.jit
def _runs(value, KEEP: tl.constexpr):
    """[LANES, VEC] as [LANES, KEEP, VEC // KEEP]."""
    return tl.reshape(value, (value.shape[0], KEEP, value.shape[1] // KEEP))


@triton.jit
def _of_all_positions(pivot, distance, square, count, values, POSITIONS: tl.constexpr, FAST: tl.constexpr):
    """Mean and sum of squared deviations of each run of columns, [1, UNITS * KEEP], from those of the lanes.

    A lane's mean is pivot + distance, each [LANES, KEEP], of `count` [LANES, 1] of all `values`.
    """
    runs: tl.constexpr = pivot.shape[0] // POSITIONS * pivot.shape[1]
    share = rounded_product(count / values + tl.zeros_like(pivot), pivot + distance, FAST)
    rough = tl.sum(tl.reshape(share, (POSITIONS, runs)), 0, keep_dims=True)
    rough_of_lane = tl.reshape(tl.broadcast_to(rough, (POSITIONS, runs)), pivot.shape)
    delta = (pivot - rough_of_lane) + distance
    weighted = count * delta
    rest, square = sum_pair(
        tl.reshape(weighted, (POSITIONS, runs)), tl.reshape(square + weighted * delta, (POSITIONS, runs)), 0, FAST
    )
    rest = rest / values
    return rough + rest, square - values * rest * rest


@triton.jit(do_not_specialize=["hw", "units", "splits"])
def group_norm_nhwc_stream_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    hw: tl.int32,
    units: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    KEEP: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of each run of columns over every `splits`th step of CHUNKS tiles of a sample.

    Parts lie as [N, splits, units * KEEP] or, where lanes IDLE, as [N, splits, positions of a tile, units * KEEP].
    All programs of a sample walk it side by side, so that what memory is asked for at a time lies together.
    """
    let_next_start(EARLY)
    program = tl.program_id(0)
    sample = (program // splits).to(tl.int64)
    split = program % splits
    c = units * VEC
    width: tl.constexpr = VEC // KEEP
    position, column, positions = places(units, LANES, VEC)
    at = position * c + column
    tile = positions * c
    step_positions = positions * CHUNKS
    steps = tl.cdiv(hw, step_positions)
    turns = tl.cdiv(steps - split, splits)
    # Of the turns all but the last of the last program are whole.
    left = (hw - (split + (turns - 1) * splits).to(tl.int64) * step_positions).to(tl.int32)
    left = tl.minimum(left, step_positions)
    whole = turns
    if not WHOLE:
        whole = turns - (left < step_positions).to(tl.int32)
    start = (sample * hw + split.to(tl.int64) * step_positions) * c
    stride = (splits * step_positions).to(tl.int64) * c

    first_left = tl.minimum(hw - split.to(tl.int64) * step_positions, step_positions).to(tl.int32)
    first = load_positions(x_ptr, start, at, positions, tile, first_left, position, 1, WHOLE, IDLE, "")
    residual = load_positions(residual_ptr, start, at, positions, tile, first_left, position, 1, WHOLE, IDLE, "")
    pivot = tl.sum(_runs(chunk_of(first, residual, 0, FAST), KEEP), 2) * (1.0 / width)
    sum_1 = tl.zeros(pivot.shape, tl.float32)
    sum_2 = tl.zeros(pivot.shape, tl.float32)
    for _ in range(0, whole):
        tiles = load_positions(x_ptr, start, at, positions, tile, 0, position, CHUNKS, True, IDLE, "")
        residuals = load_positions(residual_ptr, start, at, positions, tile, 0, position, CHUNKS, True, IDLE, "")
        sum_1, sum_2 = _add_tiles(
            tiles, residuals, pivot, sum_1, sum_2, positions, 0, position, True, IDLE, KEEP, FAST
        )
        start += stride
    count = (whole * (CHUNKS * width)).to(tl.float32) + tl.zeros((LANES, 1), tl.float32)
    if not WHOLE:  # noqa: SIM102 (a constexpr and a run-time condition)
        if whole < turns:
            tiles = load_positions(x_ptr, start, at, positions, tile, left, position, CHUNKS, False, IDLE, "")
            residuals = load_positions(
                residual_ptr, start, at, positions, tile, left, position, CHUNKS, False, IDLE, ""
            )
            sum_1, sum_2 = _add_tiles(
                tiles, residuals, pivot, sum_1, sum_2, positions, left, position, False, IDLE, KEEP, FAST
            )
            more = tl.maximum(left - position + positions - 1, 0) // positions
            count += (more * width).to(tl.float32)
    if IDLE:
        count = tl.where(position < positions, count, 0.0)

    distance = sum_1 / tl.maximum(count, 1.0)
    mean = pivot + distance
    square = sum_2 - sum_1 * distance
    if IDLE:
        lane = tl.arange(0, LANES)[:, None]
        slot = (program.to(tl.int64) * (positions * units) + lane) * KEEP + tl.arange(0, KEEP)[None, :]
        mask = position < positions
    else:
        values = (((turns - 1) * step_positions + left) * width).to(tl.float32)
        mean, square = _of_all_positions(pivot, distance, square, count, values, POSITIONS, FAST)
        slot = program.to(tl.int64) * (units * KEEP) + tl.arange(0, LANES // POSITIONS * KEEP)[None, :]
        mask = tl.full(mean.shape, True, tl.int1)
    tl.store(mean_part_ptr + slot, mean, mask=mask)
    # maximum would lose a NaN.
    tl.store(square_part_ptr + slot, tl.where(square < 0.0, 0.0, square), mask=mask)


@triton.jit
def _load_parts(
    mean_part_ptr, square_part_ptr, first_part, hw, group_runs, runs, splits, positions, chunks,
    BLOCK_PARTS: tl.constexpr, BLOCK_RUNS: tl.constexpr, POSITIONS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values, mean and sum of squares of parts from `first_part` on, [BLOCK_PARTS, BLOCK_RUNS]; see the kernel.

    POSITIONS is how many of a tile's `positions` are in one part.
    """
    part = first_part + tl.arange(0, BLOCK_PARTS)[:, None]
    run = tl.arange(0, BLOCK_RUNS)[None, :]
    if POSITIONS == 1:
        split = part // positions
        position = part % positions
    else:
        split = part
        position = 0
    step = positions * chunks
    steps = tl.cdiv(hw, step)
    # Whole steps, and what the last step of all has left.
    turns = tl.cdiv(tl.maximum(steps - split, 0), splits)
    left = tl.where((steps - 1) % splits == split, hw - (steps - 1) * step, step)
    if POSITIONS == 1:
        taken = (turns - 1) * chunks + (tl.maximum(left - position, 0) + positions - 1) // positions
    else:
        taken = (turns - 1) * step + left
    mask = (split < splits) & (run < group_runs)
    values = tl.where(mask, taken, 0).to(tl.float32) * WIDTH
    at = part.to(tl.int64) * runs + run
    mean = tl.load(mean_part_ptr + at, mask=mask, other=0.0)
    return values, mean, tl.load(square_part_ptr + at, mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=[
        "hw", "groups", "channels", "splits", "positions", "chunks", "parts", "group_runs", "scale_stride",
        "columns",
    ]
)  # fmt: skip
def group_norm_nhwc_stream_fold_kernel(
    mean_part_ptr,
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
    positions: tl.int32,
    chunks: tl.int32,
    parts: tl.int32,
    group_runs: tl.int32,
    scale_stride: tl.int64,
    columns: tl.int64,
    eps: tl.float32,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Statistics of one group a program, and what its channels are normalised by.

    A sample has `parts` parts of all runs of WIDTH columns, `group_runs` to a group: one for each split, or
    (POSITIONS is 1) one for each of the `positions` of a tile in each split, whose steps are of `chunks` tiles.
    With the three coefficients of `columns` columns each, y is act((h - first) * second + third).
    """
    let_next_start(EARLY)
    program = tl.program_id(0)
    sample = (program // groups).to(tl.int64)
    group = program % groups
    runs = groups.to(tl.int64) * group_runs
    first = sample * parts * runs + group * group_runs
    mean_part_ptr += first
    square_part_ptr += first
    total = hw.to(tl.float32) * channels
    await_previous(EARLY)
    rough = tl.zeros((BLOCK_PARTS, BLOCK_RUNS), tl.float32)
    for first_part in range(0, parts, BLOCK_PARTS):
        values, part_mean, _ = _load_parts(
            mean_part_ptr, square_part_ptr, first_part, hw, group_runs, runs, splits, positions, chunks,
            BLOCK_PARTS, BLOCK_RUNS, POSITIONS, WIDTH,
        )  # fmt: skip
        rough += rounded_product(values / total, part_mean, FAST)
    rough = tl.sum(tl.sum(rough, 1), 0)
    weighted = tl.zeros((BLOCK_PARTS, BLOCK_RUNS), tl.float32)
    square = tl.zeros((BLOCK_PARTS, BLOCK_RUNS), tl.float32)
    for first_part in range(0, parts, BLOCK_PARTS):
        values, part_mean, part_square = _load_parts(
            mean_part_ptr, square_part_ptr, first_part, hw, group_runs, runs, splits, positions, chunks,
            BLOCK_PARTS, BLOCK_RUNS, POSITIONS, WIDTH,
        )  # fmt: skip
        delta = part_mean - rough
        weighted += values * delta
        square += part_square + values * delta * delta
    rest = tl.sum(tl.sum(weighted, 1), 0) / total
    variance = tl.sum(tl.sum(square, 1), 0) / total - rest * rest
    mean = rough + rest
    rstd = 1.0 / tl.sqrt(tl.where(variance < 0.0, 0.0, variance) + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + program, mean)
        tl.store(rstd_ptr + program, rstd)
    for start in range(0, channels, BLOCK_CHANNELS):
        within = start + tl.arange(0, BLOCK_CHANNELS)
        channel = group * channels + within
        of_group = within < channels
        parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
        slope, offset = load_masked_affine(parameters, channel, sample * scale_stride + channel, of_group)
        at = coefficient_ptr + sample * (groups * channels) + channel
        tl.store(at, mean + tl.zeros((BLOCK_CHANNELS,), tl.float32), mask=of_group)
        tl.store(at + columns, rstd * slope, mask=of_group)
        tl.store(at + 2 * columns, offset + tl.zeros((BLOCK_CHANNELS,), tl.float32), mask=of_group)


@triton.jit(do_not_specialize=["hw", "units", "samples", "seed", "dropout_threshold"])
def group_norm_nhwc_stream_apply_kernel(
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
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    IDLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one piece of CHUNKS tiles; the last positions of all samples first, for they were read last."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program % samples).to(tl.int64)
    position, column, positions = places(units, LANES, VEC)
    c = units * VEC
    first = (program // samples).to(tl.int64) * (positions * CHUNKS)
    left = tl.minimum(hw - first, positions * CHUNKS).to(tl.int32)
    start = (sample * hw + first) * c
    at = position * c + column
    tile = positions * c
    tiles = load_positions(x_ptr, start, at, positions, tile, left, position, CHUNKS, WHOLE, IDLE, "")
    residuals = load_positions(residual_ptr, start, at, positions, tile, left, position, CHUNKS, WHOLE, IDLE, "")
    await_previous(EARLY)
    coefficients = coefficient_ptr + sample * c + column
    columns = samples.to(tl.int64) * c
    mean = tl.load(coefficients)
    slope = tl.load(coefficients + columns)
    offset = tl.load(coefficients + 2 * columns)
    for i in tl.static_range(CHUNKS):
        mask = position_mask(position, positions, left, i, WHOLE, IDLE)
        h = chunk_of(tiles, residuals, i, FAST)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + start + i * tile + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        y = activate_to((h - mean) * slope + offset, y_ptr.dtype.element_ty, ACTIVATION, FAST)
        if DROPOUT:
            keep = dropout_keep(seed, sample, first * c + i * tile + at, dropout_threshold)
            y = tl.where(keep, y * dropout_scale, 0.0)
        tl.store(y_ptr + start + i * tile + at, y.to(y_ptr.dtype.element_ty), mask=mask)
