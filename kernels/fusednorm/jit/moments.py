"""Moments of rows, for forward and backward kernels of LayerNorm and RMSNorm, and the merge of moments of sets.

Mean and variance are computed about a pivot within the range of the values, never as E[x^2] - mean^2.  A mean is
two float32 numbers: one near it, and the rest.  A single number would be rounded, and if the mean is many standard
deviations from zero, the rounding errors of several sets' means would be a part of the variance of their union.
"""

import triton
import triton.language as tl

from fusednorm.jit.loads import load_gate, load_row_residual_sum, make_column_mask
from fusednorm.jit.reductions import multiply_for_uniform_sum, multiply_rounded, sum_pair

_MOST_THREADS = tl.constexpr(1024)
"""The most threads of a program."""


@triton.jit
def _square_first_chunk(d):
    """Compute d * d, [ROWS, BLOCK_N], for a sum that is the same number in all threads.

    A thread of a longer block than there are threads holds several columns, and adds its last square to its own.
    """
    if d.shape[1] > _MOST_THREADS:
        return d * d
    else:
        return multiply_for_uniform_sum(d, d)


@triton.jit
def compute_tile_moments(chunks, masks, count, FULL: tl.constexpr, IS_RMS: tl.constexpr):
    """Compute each row's mean, in two parts (pivot + shift), and its sum of squares.  The tile has complete rows.

    Returns pivot, shift and sum of squares, [ROWS, 1] each.  The mean is pivot + shift; subtract the pivot
    first, then the shift.  The squares are about the mean.  For RMSNorm pivot and shift are 0, and the
    squares are about 0.

    `chunks` are a tuple of blocks of the tile, [ROWS, BLOCK_N]; `masks` are their masks of columns that
    exist, [1, BLOCK_N], and the first FULL of them have no gaps; `count` is the number of columns in all of them.
    """
    if IS_RMS:
        squares = _square_first_chunk(chunks[0])
        for i in tl.static_range(1, len(chunks)):
            squares += chunks[i] * chunks[i]
        square = tl.sum(squares, 1, keep_dims=True)
        pivot = tl.zeros_like(square)
        shift = pivot
    else:
        total = chunks[0]
        for i in tl.static_range(1, len(chunks)):
            total += chunks[i]
        # A pivot near the mean makes the second pass exact; that pass also computes the pivot's error, the shift.
        pivot = tl.sum(total, 1, keep_dims=True) / count
        shifts = tl.zeros_like(total)
        squares = tl.zeros_like(total)
        for i in tl.static_range(len(chunks)):
            d = chunks[i] - pivot
            if i >= FULL:
                d = tl.where(masks[i], d, 0.0)
            shifts += d
            squares += _square_first_chunk(d) if i == 0 else d * d
        shift, square = sum_pair(shifts, squares, 1)
        shift = shift / count
        square = tl.maximum(square - shift * shift * count, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return pivot, shift, square


@triton.jit
def store_row_statistics(mean_ptr, rstd_ptr, row, mean, shift, rstd, mask):
    """Store each row's mean and rstd, except one whose pointer is None.  The stored mean is the sum of `mean`
    and `shift`.

    `mask` selects the rows that are stored; None selects all.
    """
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean + shift, mask=mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=mask)


@triton.jit
def compute_mean_term(count, mean, rest, total):
    """Compute the contribution of one set to the mean of all sets' values: its share of the values times its mean.

    The set has `count` of `total` values, and its mean is mean + rest.  The sum of these terms is equal in
    all threads, and, because of rounding, only near the mean.
    """
    return multiply_rounded(count / total + tl.zeros_like(mean), mean + rest)


@triton.jit
def convert_moments_to_sums(rough, count, mean, rest, square):
    """Convert the moments of a set of values x to its sums of x - rough and of (x - rough)^2.

    `rough` is a number near the mean of all sets, about which their sums can be added.  The set's mean is
    mean + rest; `square` is its sum of squares about that mean.  The first sum is not contracted into an
    addition, so that a sum of such sums is the same in all threads.
    """
    delta = (mean - rough) + rest
    weighted = multiply_rounded(count + tl.zeros_like(delta), delta)
    return weighted, square + weighted * delta


@triton.jit
def convert_sums_to_moments(total, sum_1, sum_2):
    """Convert sums of x - rough and of (x - rough)^2 to moments.

    Returns `rest` of the mean, and the sum of squares about the mean.  The mean is rough + rest.  `total` is
    the number of values; `sum_1` and `sum_2` are their sums.
    """
    rest = sum_1 / total
    return rest, tl.maximum(sum_2 - total * rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def merge_moments(count, mean, rest, square, total, AXIS: tl.constexpr):
    """Merge the moments of several sets, along AXIS, into those of their union (Chan's merge).

    Returns mean, `rest` and sum of squares, and keeps the axis.  The mean is mean + rest, of the sets and of
    the union.  All results are the same numbers in all threads.

    Args:
        count: the number of values of each set, float32; a set of none has the mean, rest and square 0.
        total: the number of values of all sets, float32.
    """
    rough = tl.sum(compute_mean_term(count, mean, rest, total), AXIS, keep_dims=True)
    sum_1, sum_2 = convert_moments_to_sums(rough, count, mean, rest, square)
    sum_1, sum_2 = sum_pair(sum_1, sum_2, AXIS)
    rest, square = convert_sums_to_moments(total, sum_1, sum_2)
    return rough, rest, square


@triton.jit
def compute_mean_and_variance_from_lane_sums(pivot, sum_1, sum_2, count, n):
    """Compute a row's mean, in two parts (rough + shift), and its variance from each lane's sums about the
    lane's pivot.

    Returns rough, shift and variance, [1, 1] each.  The mean is rough + shift; the variance is that of the
    population.  The lanes' sums are combined by Chan's merge.

    A lane's pivot is the mean of its first values, so (pivot - lane mean)^2 is at most a few times the
    lane's own spread for each chunk.  The error from cancellation is thus at most the number of chunks times
    2^-24 of the result, for any row.

    Args:
        pivot, sum_1, sum_2: [LANES, 1], the pivot and the sums of x - pivot and (x - pivot)^2.
        count: [LANES, 1] float32, the number of values in each lane, possibly 0.
        n: float32, the number of values in the row.
    """
    lane_shift = sum_1 / tl.maximum(count, 1.0)
    rough = tl.sum(multiply_rounded(count, pivot + lane_shift), 0, keep_dims=True) / n
    delta = (pivot - rough) + lane_shift
    weighted = multiply_rounded(count, delta)
    square = (sum_2 - sum_1 * lane_shift) + weighted * delta
    shift, square = sum_pair(weighted, square, 0)
    shift = shift / n
    variance = tl.maximum(square / n - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return rough, shift, variance


@triton.jit
def compute_row_mean_and_variance(
    x_ptr,
    residual_ptr,
    gate_ptr,
    x_row,
    residual_row,
    cols,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    """Compute one row's mean, in two parts (rough + shift), and its variance.  The row is read in chunks of
    BLOCK_N columns.

    Returns rough, shift and variance, [1, 1] each.  The mean is rough + shift.  Subtract rough first, then
    shift: that keeps x - mean exact to a float32 rounding of the difference.  `x_row` and `residual_row` are
    the row's offsets in elements; `gate_ptr` points to the sample's gate.  For RMSNorm rough and shift are 0, and
    the variance is the mean square.

    A lane is the GROUP columns that one thread loads at once; its sums take three registers, not three for
    each column.
    """
    lanes: tl.constexpr = BLOCK_N // GROUP
    col = tl.arange(0, lanes)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    n = cols.to(tl.float32)
    mask = make_column_mask(col, cols, EVEN)
    gates = load_gate(gate_ptr, col, mask)
    _, h = load_row_residual_sum(x_ptr, residual_ptr, gates, x_row + col, residual_row + col, mask, "evict_last")
    first_count = tl.sum(mask.to(tl.float32), 1, keep_dims=True)
    sum_1 = tl.zeros((lanes, 1), tl.float32)
    if IS_RMS:
        pivot = sum_1
        sum_2 = tl.sum(multiply_for_uniform_sum(h, h), 1, keep_dims=True)
    else:
        pivot = tl.sum(h, 1, keep_dims=True) / tl.maximum(first_count, 1.0)
        d = h - pivot
        if not EVEN:
            d = tl.where(mask, d, 0.0)
        sum_1 += tl.sum(d, 1, keep_dims=True)
        sum_2 = tl.sum(multiply_for_uniform_sum(d, d), 1, keep_dims=True)
    count = first_count
    for chunk in range(1, tl.cdiv(cols, BLOCK_N)):
        at = col + chunk * BLOCK_N
        mask = make_column_mask(at, cols, EVEN)
        gates = load_gate(gate_ptr, at, mask)
        _, h = load_row_residual_sum(x_ptr, residual_ptr, gates, x_row + at, residual_row + at, mask, "evict_last")
        if IS_RMS:
            sum_2 += tl.sum(multiply_for_uniform_sum(h, h), 1, keep_dims=True)
        else:
            d = h - pivot
            if not EVEN:
                d = tl.where(mask, d, 0.0)
            sum_1 += tl.sum(d, 1, keep_dims=True)
            sum_2 += tl.sum(multiply_for_uniform_sum(d, d), 1, keep_dims=True)
            count += tl.sum(mask.to(tl.float32), 1, keep_dims=True)

    if IS_RMS:
        rough = tl.zeros((1, 1), tl.float32)
        shift = tl.zeros((1, 1), tl.float32)
        variance = tl.sum(sum_2, 0, keep_dims=True) / n
    else:
        rough, shift, variance = compute_mean_and_variance_from_lane_sums(pivot, sum_1, sum_2, count, n)
    return rough, shift, variance
