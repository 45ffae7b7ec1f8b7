"""Ranges of vectors of contiguous groups: their moments and their outputs.

A group is a run of `group_units` vectors of VEC elements, processed in tiles [ROWS, UNITS, VEC] whose last axis is
one 128-bit access of one thread.  If a channel is whole vectors (ALIGNED), the channel, its weight and its bias are
determined once per vector.  No size is a constexpr: lengths are in units of VEC, so the compiler knows that
addresses are multiples of it, and division by the channel's length is a multiplication by `magic` and a shift.

Statistics hold a pivot for each vector lane, one of that lane's own values, and sums of differences from it;
they are merged across lanes and programs by Chan's formula.  With n values per lane, (pivot - lane mean)^2 is at
most n times the lane's own variance, so the error from cancellation is at most n * 2^-24 of the result for any
data.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import load_residual_sum
from fusednorm.jit.moments import merge_moments
from fusednorm.jit.reductions import multiply_for_uniform_sum
from fusednorm.ops.group_norm.affine_step import load_slope_and_offset


@triton.jit
def divide_by_multiplication(i, divisor, magic, shift, WIDE: tl.constexpr):
    """Compute i // divisor for 0 <= i < 2^31 by a multiplication and a shift, or by a division if WIDE.

    magic = ceil(2^(31 + shift) / divisor), and 2^shift >= divisor.
    """
    if WIDE:
        return i // divisor
    else:
        high = tl.umulhi(i.to(tl.uint32) * 2, magic.to(tl.uint32))
        return (high >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def _load_and_accumulate_sums(x_ptr, residual_ptr, unit, mask, pivot, sum_1, sum_2, VEC: tl.constexpr):
    """Load a tile of h, [1, UNITS, VEC], and add it to two running sums for each of its vectors, [1, UNITS, 1].

    The sums are of h - pivot and of (h - pivot)^2, with h = x + residual.  A thread computes its sum over
    VEC alone.
    """
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    h = load_residual_sum(x_ptr, residual_ptr, at, mask, "evict_last")
    d = tl.where(mask, h - pivot, 0.0)
    return sum_1 + tl.sum(d, 2, keep_dims=True), sum_2 + tl.sum(multiply_for_uniform_sum(d, d), 2, keep_dims=True)


@triton.jit
def compute_range_moments(
    x_ptr,
    residual_ptr,
    first,
    last,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute the moments of the vectors first <= unit < last, [1, 1, 1] each.  They are the mean, in two
    parts (mean + rest), and the sum of squared deviations.
    """
    lane = tl.arange(0, UNITS)[None, :, None]
    units = last - first
    full = units // UNITS
    tail = units - full * UNITS

    start = (first + lane) * VEC
    pivot = load_residual_sum(x_ptr, residual_ptr, start, lane < units, "evict_last")
    sum_1 = tl.zeros((1, UNITS, 1), tl.float32)
    sum_2 = tl.zeros((1, UNITS, 1), tl.float32)
    whole = tl.full((1, UNITS, 1), True, tl.int1)
    for tile in range(0, full):
        unit = first + tile * UNITS + lane
        sum_1, sum_2 = _load_and_accumulate_sums(x_ptr, residual_ptr, unit, whole, pivot, sum_1, sum_2, VEC)
    if tail > 0:
        unit = first + full * UNITS + lane
        sum_1, sum_2 = _load_and_accumulate_sums(x_ptr, residual_ptr, unit, unit < last, pivot, sum_1, sum_2, VEC)

    count = ((full + (lane < tail).to(tl.int32)) * VEC).to(tl.float32)
    total = units.to(tl.float32) * VEC
    shift = sum_1 / tl.maximum(count, 1.0)
    return merge_moments(count, pivot, shift, sum_2 - sum_1 * shift, total, 1)


@triton.jit
def store_normalised_tile(
    h,
    mean,
    rest,
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
    division_shift,
    scale_stride,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Normalise a tile h, apply affine step, activation and dropout, and store y and h.

    The group's mean is mean + rest; `group` is the index in the sample; `channels` is per group; `channel_length`
    is in vectors if ALIGNED.
    """
    at = unit * VEC + tl.arange(0, VEC)[None, None, :]
    if residual_out_ptr is not None:
        tl.store((residual_out_ptr + base) + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
    # The parameters are loaded after the reductions, so that they use no registers during them.
    if ALIGNED:
        channel = group * channels + divide_by_multiplication(unit, channel_length, magic, division_shift, WIDE)
    else:
        channel = group * channels + divide_by_multiplication(at, channel_length, magic, division_shift, WIDE)
    sample_channel = sample * scale_stride + channel
    weight, bias = load_slope_and_offset(parameters, channel, sample_channel, mask)
    slope = weight * rstd
    z = (h - mean) * slope + (bias - rest * slope)
    y = activate_for_dtype(z, negative_slope, y_ptr.dtype.element_ty, ACTIVATION)
    if DROPOUT:
        position = (group.to(tl.int64) * group_units) * VEC + at
        position += tl.zeros(y.shape, tl.int64)
        keep = compute_keep_mask(seed, sample.to(tl.int64), position, dropout_threshold)
        y = tl.where(keep, y * dropout_scale, 0.0)
    tl.store((y_ptr + base) + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def normalise_range(
    x_ptr,
    residual_ptr,
    parameters,
    y_ptr,
    residual_out_ptr,
    mean,
    rest,
    rstd,
    row,
    first,
    last,
    group_units,
    groups,
    channels,
    channel_length,
    magic,
    division_shift,
    scale_stride,
    seed,
    dropout_threshold,
    dropout_scale,
    negative_slope,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of the vectors first <= unit < last of one group, last tile first.

    The end of the range was read last and is still in the cache.
    """
    base = row * (group_units.to(tl.int64) * VEC)
    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    lane = tl.arange(0, UNITS)[None, :, None]
    inner = tl.arange(0, VEC)[None, None, :]
    full = (last - first) // UNITS
    if first + full * UNITS < last:
        unit = first + full * UNITS + lane
        mask = unit < last
        at = unit * VEC + inner
        h = load_residual_sum(x_ptr, residual_ptr, at, mask, "evict_first")
        store_normalised_tile(
            h, mean, rest, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, mask,
            group_units, groups, channels, channel_length, magic, division_shift, scale_stride,
            seed, dropout_threshold, dropout_scale, negative_slope, VEC, ALIGNED, WIDE, ACTIVATION, DROPOUT,
        )  # fmt: skip
    whole = tl.full((1, UNITS, 1), True, tl.int1)
    for step in range(0, full):
        unit = first + (full - 1 - step) * UNITS + lane
        at = unit * VEC + inner
        h = load_residual_sum(x_ptr, residual_ptr, at, whole, "evict_first")
        store_normalised_tile(
            h, mean, rest, rstd, parameters, y_ptr, residual_out_ptr, base, sample, group, unit, whole,
            group_units, groups, channels, channel_length, magic, division_shift, scale_stride,
            seed, dropout_threshold, dropout_scale, negative_slope, VEC, ALIGNED, WIDE, ACTIVATION, DROPOUT,
        )  # fmt: skip
