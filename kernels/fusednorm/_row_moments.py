"""Loading rows and taking their moments: what forward and backward kernels of LayerNorm and RMSNorm share.

Mean and variance are taken about a pivot that lies among the values, never as E[x^2] - mean^2.
"""

import triton
import triton.language as tl

from fusednorm._reductions import sum_pair


@triton.jit
def column_mask(col, cols, EVEN: tl.constexpr):
    """Which columns exist; a constant, which the compiler folds away, where every block is full."""
    if EVEN:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def load_rows(x_ptr, residual_ptr, x_at, residual_at, mask, EVICT: tl.constexpr):
    """x, or x + residual, in float32; masked lanes are 0."""
    h = tl.load(x_ptr + x_at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + residual_at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return h


@triton.jit
def tile_moments(h, col_mask, cols, EVEN: tl.constexpr, IS_RMS: tl.constexpr, FAST: tl.constexpr):
    """h - mean (h itself for RMSNorm), mean and variance of whole rows held in a [ROWS, BLOCK_N] tile."""
    inverse_n = 1.0 / cols.to(tl.float32)
    if IS_RMS:
        variance = tl.sum(h * h, 1, keep_dims=True) * inverse_n
        return h, tl.zeros_like(variance), variance
    else:
        # A pivot near the mean makes the second pass exact; what it is off by comes out of that pass.
        pivot = tl.sum(h, 1, keep_dims=True) * inverse_n
        d = h - pivot
        if not EVEN:
            d = tl.where(col_mask, d, 0.0)
        shift, square = sum_pair(d, d * d, 1, FAST)
        shift *= inverse_n
        variance = tl.maximum(square * inverse_n - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return d - shift, pivot + shift, variance


@triton.jit
def _lane_moments(pivot, sum_1, sum_2, count, inverse_n, FAST: tl.constexpr):
    """Mean and population variance of a row from per-lane sums about per-lane pivots (Chan's merge).

    Each pivot is one of its own lane's values, so (pivot - lane mean)^2 is at most count times the lane's own
    spread: what cancels is bounded by count * 2^-24 of the result, for any row.

    Args:
        pivot, sum_1, sum_2: [1, BLOCK_N], the pivot and the sums of x - pivot and (x - pivot)^2.
        count: [1, BLOCK_N] float32, values in each lane, 0 where a lane has none.
        inverse_n: 1 / cols.
    """
    inverse_count = 1.0 / tl.maximum(count, 1.0)
    lane_shift = sum_1 * inverse_count
    rough = tl.sum(count * (pivot + lane_shift), 1, keep_dims=True) * inverse_n
    delta = (pivot - rough) + lane_shift
    # A lane without values holds the pivot 0; its weight of zero keeps it out, unless rough is not finite.
    weighted = count * delta
    square = (sum_2 - sum_1 * lane_shift) + weighted * delta
    shift, square = sum_pair(weighted, square, 1, FAST)
    shift *= inverse_n
    variance = tl.maximum(square * inverse_n - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return rough, shift, variance


@triton.jit
def sweep_moments(
    x_ptr,
    residual_ptr,
    x_row,
    residual_row,
    cols,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_RMS: tl.constexpr,
    FAST: tl.constexpr,
):
    """(rough, shift, variance) of one row read in chunks of BLOCK_N, with mean = rough + shift; each [1, 1].

    Subtract rough first, then shift: that keeps x - mean exact to a float32 rounding of the difference.
    """
    col = tl.arange(0, BLOCK_N)[None, :]
    inverse_n = 1.0 / cols.to(tl.float32)
    mask = column_mask(col, cols, EVEN)
    pivot = load_rows(x_ptr, residual_ptr, x_row + col, residual_row + col, mask, "evict_last")
    sum_1 = tl.zeros((1, BLOCK_N), tl.float32)
    sum_2 = tl.zeros((1, BLOCK_N), tl.float32)
    if IS_RMS:
        sum_2 = pivot * pivot
    for chunk in range(1, tl.cdiv(cols, BLOCK_N)):
        at = col + chunk * BLOCK_N
        mask = column_mask(at, cols, EVEN)
        h = load_rows(x_ptr, residual_ptr, x_row + at, residual_row + at, mask, "evict_last")
        if IS_RMS:
            sum_2 += h * h
        else:
            d = h - pivot
            if not EVEN:
                d = tl.where(mask, d, 0.0)
            sum_1 += d
            sum_2 += d * d

    if IS_RMS:
        rough = tl.zeros((1, 1), tl.float32)
        shift = tl.zeros((1, 1), tl.float32)
        variance = tl.sum(sum_2, 1, keep_dims=True) * inverse_n
    else:
        count = (cols // BLOCK_N + (col < cols % BLOCK_N).to(tl.int32)).to(tl.float32)
        rough, shift, variance = _lane_moments(pivot, sum_1, sum_2, count, inverse_n, FAST)
    return rough, shift, variance
