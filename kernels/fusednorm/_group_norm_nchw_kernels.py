"""Forward kernels of GroupNorm where each group is contiguous: [N, C, *spatial] in plain memory order.

A group is a run of `group_units` vectors of VEC elements, walked in tiles [ROWS, UNITS, VEC] whose last axis
is one 128-bit access of one thread.  Where a channel is whole vectors (ALIGNED), the channel, its weight and
its bias are found once a vector.  No size is a constexpr: lengths arrive in units of VEC, so addresses are
known multiples of it, and division by the channel's length is a multiplication by `magic` and a shift.

Statistics hold a pivot for each vector lane, one of that lane's own values, and sums of differences from it;
they are merged across lanes and programs by Chan's formula.  With n values a lane, (pivot - lane mean)^2 is
at most n times the lane's own variance, so what cancels is n * 2^-24 of the result at worst, whatever the
data.

The file is long by its argument lists, a line each.
"""

import triton
import triton.language as tl

from fusednorm._early_start import await_previous, let_next_start
from fusednorm._group_norm_affine import load_masked_affine
from fusednorm._group_norm_fold_kernels import fold_moments
from fusednorm._group_norm_tiles import load_sum
from fusednorm._reductions import rounded_product, sum_pair
from fusednorm.epilogue import activate_to, dropout_keep


@triton.jit
def quotient(i, divisor, magic, shift, WIDE: tl.constexpr):
    """i // divisor for 0 <= i < 2^31, where magic = ceil(2^(31 + shift) / divisor) and 2^shift >= divisor."""
    if WIDE:
        return i // divisor
    else:
        high = tl.umulhi(i.to(tl.uint32) * 2, magic.to(tl.uint32))
        return (high >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def _residual_at(at, elsewhere, OTHER: tl.constexpr):
    """Where the residual of elements `at` of a group lies: there, or, OTHER, in its sample with channels last.

    `elsewhere` is the group's first channel, the positions of a channel and the sample's channels.
    """
    if OTHER:
        channel = at // elsewhere[1]
        return (at - channel * elsewhere[1]) * elsewhere[2] + (elsewhere[0] + channel)
    else:
        return at


@triton.jit
def _accumulate(
    x_ptr, residual_ptr, elsewhere, unit, mask, pivot, sum_1, sum_2, VEC: tl.constexpr, OTHER: tl.constexpr
):
    """Add a tile to the lanes' sums of h - pivot and (h - pivot)^2; each sum over VEC stays in its thread."""
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    h = load_sum(x_ptr, residual_ptr, at, _residual_at(at, elsewhere, OTHER), mask, "evict_last")
    d = tl.where(mask, h - pivot, 0.0)
    return sum_1 + tl.sum(d, 2, keep_dims=True), sum_2 + tl.sum(d * d, 2, keep_dims=True)


@triton.jit
def run_moments(
    x_ptr,
    residual_ptr,
    elsewhere,
    first,
    last,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
):
    """Mean and sum of squared deviations of the vectors first <= unit < last, each [1, 1, 1].

    `elsewhere` and OTHER are those of `_residual_at`.
    """
    lane = tl.arange(0, UNITS)[None, :, None]
    units = last - first
    full = units // UNITS
    tail = units - full * UNITS

    start = (first + lane) * VEC
    pivot = load_sum(x_ptr, residual_ptr, start, _residual_at(start, elsewhere, OTHER), lane < units, "evict_last")
    sum_1 = tl.zeros((1, UNITS, 1), tl.float32)
    sum_2 = tl.zeros((1, UNITS, 1), tl.float32)
    whole = tl.full((1, UNITS, 1), True, tl.int1)
    for tile in range(0, full):
        unit = first + tile * UNITS + lane
        sum_1, sum_2 = _accumulate(x_ptr, residual_ptr, elsewhere, unit, whole, pivot, sum_1, sum_2, VEC, OTHER)
    if tail > 0:
        unit = first + full * UNITS + lane
        sum_1, sum_2 = _accumulate(
            x_ptr, residual_ptr, elsewhere, unit, unit < last, pivot, sum_1, sum_2, VEC, OTHER
        )

    count = ((full + (lane < tail).to(tl.int32)) * VEC).to(tl.float32)
    total = units.to(tl.float32) * VEC
    lane_shift = sum_1 / tl.maximum(count, 1.0)
    rough = tl.sum(rounded_product(count / total, pivot + lane_shift, FAST), 1, keep_dims=True)
    delta = (pivot - rough) + lane_shift
    weighted = count * delta
    shift, square = sum_pair(weighted, (sum_2 - sum_1 * lane_shift) + weighted * delta, 1, FAST)
    shift /= total
    # maximum would lose a NaN.
    square = square - total * shift * shift
    return rough + shift, tl.where(square < 0.0, 0.0, square)


@triton.jit
def _store_normalised(
    h,
    mean,
    rstd,
    parameters,
    y_ptr,
    residual_out_ptr,
    base,
    sample,
    group,
    unit,
    mask,
    group_units,
    groups,
    channels,
    channel_length,
    magic,
    shift,
    scale_stride,
    seed,
    dropout_threshold,
    dropout_scale,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Affine step, activation, dropout and the stores of one tile.

    `group` counts inside its sample; `channels` a group; `channel_length` is in vectors when ALIGNED.
    """
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    if residual_out_ptr is not None:
        tl.store((residual_out_ptr + base) + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
    # The parameters come after the reductions, so that they hold no registers during them.
    if ALIGNED:
        channel = group * channels + quotient(unit, channel_length, magic, shift, WIDE)
    else:
        channel = group * channels + quotient(at, channel_length, magic, shift, WIDE)
    sample_channel = sample * scale_stride + channel
    weight, bias = load_masked_affine(parameters, channel, sample_channel, mask)
    y = activate_to((h - mean) * (weight * rstd) + bias, y_ptr.dtype.element_ty, ACTIVATION, FAST)
    if DROPOUT:
        position = (group.to(tl.int64) * group_units) * VEC + at
        position += tl.zeros(y.shape, tl.int64)
        keep = dropout_keep(seed, sample.to(tl.int64), position, dropout_threshold)
        y = tl.where(keep, y * dropout_scale, 0.0)
    tl.store((y_ptr + base) + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _normalise_run(
    x_ptr,
    residual_ptr,
    parameters,
    y_ptr,
    residual_out_ptr,
    mean,
    rstd,
    row,
    first,
    last,
    group_units,
    groups,
    channels,
    channel_length,
    magic,
    shift,
    scale_stride,
    seed,
    dropout_threshold,
    dropout_scale,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write the vectors first <= unit < last of one group, last tile first: that end is still in cache."""
    base = row * (group_units.to(tl.int64) * VEC)
    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    elsewhere = (group * channels, channel_length.to(tl.int64) * VEC, groups * channels.to(tl.int64))
    if not ALIGNED:
        elsewhere = (group * channels, channel_length.to(tl.int64), groups * channels.to(tl.int64))
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += sample * groups * channels * elsewhere[1] if OTHER else base
    lane = tl.arange(0, UNITS)[None, :, None]
    inner = tl.arange(0, VEC)[None, None, :]
    full = (last - first) // UNITS
    if first + full * UNITS < last:
        unit = first + full * UNITS + lane
        mask = unit < last
        at = unit * VEC + inner
        h = load_sum(x_ptr, residual_ptr, at, _residual_at(at, elsewhere, OTHER), mask, "evict_first")
        _store_normalised(
            h, mean, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, mask,
            group_units, groups, channels, channel_length, magic, shift, scale_stride,
            seed, dropout_threshold, dropout_scale, VEC, ALIGNED, WIDE, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
    whole = tl.full((1, UNITS, 1), True, tl.int1)
    for step in range(0, full):
        unit = first + (full - 1 - step) * UNITS + lane
        at = unit * VEC + inner
        h = load_sum(x_ptr, residual_ptr, at, _residual_at(at, elsewhere, OTHER), whole, "evict_first")
        _store_normalised(
            h, mean, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, whole,
            group_units, groups, channels, channel_length, magic, shift, scale_stride,
            seed, dropout_threshold, dropout_scale, VEC, ALIGNED, WIDE, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "rows",
        "group_units",
        "groups",
        "channels",
        "channel_length",
        "magic",
        "shift",
        "scale_stride",
    ]
)
def group_norm_nchw_tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    rows: tl.int64,
    group_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int32,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """ROWS whole groups a program, held in registers: read once, two-pass statistics, written once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    unit = tl.arange(0, UNITS)[None, :, None]
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    row_mask = row < rows
    mask = row_mask & (unit < group_units)
    base = row * (group_units.to(tl.int64) * VEC)
    length = group_units.to(tl.float32) * VEC

    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    h = load_sum(x_ptr, residual_ptr, at, at, mask, "evict_first")
    pivot = tl.sum(tl.sum(h, 2, keep_dims=True), 1, keep_dims=True) / length
    d = tl.where(mask, h - pivot, 0.0)
    offset, square = sum_pair(tl.sum(d, 2, keep_dims=True), tl.sum(d * d, 2, keep_dims=True), 1, FAST)
    offset /= length
    variance = square / length - offset * offset
    rstd = 1.0 / tl.sqrt(tl.where(variance < 0.0, 0.0, variance) + eps)
    mean = pivot + offset
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row_mask)
        tl.store(rstd_ptr + row, rstd, mask=row_mask)

    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    _store_normalised(
        h, mean, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, mask,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, ALIGNED, False, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride"]
)
def group_norm_nchw_sweep_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    group_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int32,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One group a program in two sweeps; the second walks backwards and finds the group in L1 or L2."""
    row = tl.program_id(0).to(tl.int64)
    base = row * (group_units.to(tl.int64) * VEC)
    group_residual_ptr = residual_ptr + base if residual_ptr is not None else None
    mean, square = run_moments(x_ptr + base, group_residual_ptr, None, 0, group_units, VEC, UNITS, False, FAST)
    rstd = 1.0 / tl.sqrt(square / (group_units.to(tl.float32) * VEC) + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row + tl.zeros((1, 1, 1), tl.int32), mean)
        tl.store(rstd_ptr + row + tl.zeros((1, 1, 1), tl.int32), rstd)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    _normalise_run(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rstd, row, 0, group_units,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, UNITS, ALIGNED, False, False, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["group_units", "groups", "channels", "splits", "split_units"])
def group_norm_nchw_stats_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    split_units: tl.int64,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    WIDE: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of one part of one group; parts lie as [N, splits, G]."""
    let_next_start(EARLY)
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = program - row * splits
    base = row * (group_units * VEC)
    first = split * split_units
    last = tl.minimum(first + split_units, group_units)
    if not WIDE:
        first = first.to(tl.int32)
        last = last.to(tl.int32)
    sample = row // groups
    elsewhere = ((row - sample * groups) * channels, group_units * VEC // channels, groups.to(tl.int64) * channels)
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += sample * groups * (group_units * VEC) if RESIDUAL_OTHER else base
    mean, square = run_moments(x_ptr, residual_ptr, elsewhere, first, last, VEC, UNITS, RESIDUAL_OTHER, FAST)
    slot = (sample * splits + split) * groups + (row - sample * groups) + tl.zeros((1, 1, 1), tl.int32)
    tl.store(mean_part_ptr + slot, mean)
    tl.store(square_part_ptr + slot, square)


@triton.jit(
    do_not_specialize=[
        "group_units", "groups", "channels", "channel_length", "magic", "shift", "scale_stride", "splits",
        "split_units",
        "programs_a_group", "program_units",
    ]
)  # fmt: skip
def group_norm_nchw_apply_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    residual_out_ptr,
    mean_part_ptr,
    square_part_ptr,
    mean_ptr,
    rstd_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int64,
    magic: tl.int64,
    shift: tl.int32,
    scale_stride: tl.int64,
    splits: tl.int32,
    split_units: tl.int64,
    programs_a_group: tl.int32,
    program_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Fold the parts of one group, then write one run of it; programs walk the tensor backwards."""
    await_previous(EARLY)
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = program // programs_a_group
    part = program - row * programs_a_group
    sample = row // groups
    mean, variance = fold_moments(
        mean_part_ptr + sample * splits * groups,
        square_part_ptr + sample * splits * groups,
        row - sample * groups,
        1,
        groups,
        splits,
        split_units * VEC,
        group_units * VEC,
        BLOCK_SPLITS,
        1,
        FAST,
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
        if part == 0:
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
    first = part * program_units
    last = tl.minimum(first + program_units, group_units)
    if not WIDE:
        first = first.to(tl.int32)
        last = last.to(tl.int32)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    _normalise_run(
        x_ptr, residual_ptr, parameters, y_ptr, residual_out_ptr, mean, rstd, row, first, last,
        group_units, groups, channels, channel_length, magic, shift, scale_stride,
        seed, dropout_threshold, dropout_scale,
        VEC, UNITS, ALIGNED, WIDE, RESIDUAL_OTHER, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
