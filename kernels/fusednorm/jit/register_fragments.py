"""Fragments of rows that stay in registers in the dtype that they have in memory: loads, moments, stores.

A 16-bit fragment needs half the registers of its float32 values; it is converted again each time it is used.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import apply_epilogue
from fusednorm.jit.loads import (
    add_one,
    add_residual,
    add_residual_chunk,
    add_weight_offset,
    make_column_mask,
    widen,
)
from fusednorm.jit.reductions import multiply_for_uniform_sum, multiply_rounded, sum_pair


@triton.jit
def merge_equal_sets(count_a, mean_a, shift_a, square_a, count_b, mean_b, shift_b, square_b):
    """Merge the moments of two sets of equal size by Chan's formula, as a step of `tl.reduce`.

    The number of sets in the reduction is a power of two, so that it merges only sets of equal size.  Within
    a thread the compiler merges one element after another, so a thread may hold at most two elements.

    The mean of a set is mean + shift.  The result keeps the first set's `mean`, so that only differences are
    rounded.
    """
    delta = (mean_b - mean_a) + (shift_b - shift_a)
    square = square_a + square_b + delta * delta * (count_a * 0.5)
    return count_a + count_b, mean_a, shift_a + delta * 0.5, square


@triton.jit
def merge_sets(count_a, mean_a, shift_a, square_a, count_b, mean_b, shift_b, square_b):
    """Merge the moments of two sets of any size by Chan's formula, as a step of `tl.reduce`.

    A set may be empty.  The mean of a set is mean + shift; the result keeps the first set's `mean` unless it
    is empty.
    """
    count = count_a + count_b
    delta = (mean_b - mean_a) + (shift_b - shift_a)
    share = count_b / tl.maximum(count, 1.0)
    square = square_a + square_b + delta * delta * (count_a * share)
    # The mean of an empty set is arbitrary, so the other set's is kept.
    empty = count_a == 0.0
    mean = tl.where(empty, mean_b, mean_a)
    shift = tl.where(empty, shift_b, shift_a + delta * share)
    return count, mean, shift, tl.where(empty, square_b, square)


@triton.jit
def load_fragment(
    ptr, start, fragment_cols, FULL: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Load a fragment of a row as a tuple of CHUNKS tiles [lanes, GROUP].  Each tile is a chunk of BLOCK_N columns.

    The fragment starts at ptr + start and keeps the dtype of memory.  Columns from `fragment_cols` on are 0;
    the first FULL chunks need no mask.  The tuple is empty if ptr is None.  A lane is the GROUP columns of
    each chunk that one thread loads at once.
    """
    col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = make_column_mask(col + i * BLOCK_N, fragment_cols, i < FULL)
            chunks = chunks + (
                tl.load(ptr + start + i * BLOCK_N + col, mask=mask, other=0.0, eviction_policy=EVICT),
            )
    return chunks


@triton.jit
def add_residual_fragment(chunks, residuals, gates):
    """Compute h = residual + gate * x of a loaded fragment, in float32."""
    sums = ()
    for i in tl.static_range(len(chunks)):
        sums = sums + (add_residual(chunks[i], residuals[i], gates[i : i + 1]),)
    return sums


@triton.jit
def store_residual_sum(
    chunks, residuals, residual_out_ptr, at, fragment_cols,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store h = x + residual of a loaded fragment at residual_out_ptr + at.

    If residual_out_ptr is None, nothing is stored.
    """
    if residual_out_ptr is not None:
        col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        for i in tl.static_range(len(chunks)):
            mask = make_column_mask(col + i * BLOCK_N, fragment_cols, i < FULL)
            h = add_residual_chunk(chunks, residuals, i).to(residual_out_ptr.dtype.element_ty)
            tl.store(residual_out_ptr + at + i * BLOCK_N + col, h, mask=mask)


@triton.jit
def _subtract_mean(
    chunks, residuals, i: tl.constexpr, mean, fragment_cols, FULL: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute chunk i of h - mean, or of h for RMSNorm, [lanes, GROUP]; 0 after the fragment's end."""
    d = add_residual_chunk(chunks, residuals, i)
    if not IS_RMS:
        d = d - mean
        if i >= FULL:
            col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            d = tl.where(col + i * BLOCK_N < fragment_cols, d, 0.0)
    return d


@triton.jit
def compute_lane_moments(
    chunks, residuals, fragment_cols,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute each lane's moments over a fragment, [lanes, 1] each.  They are the count, the mean in two parts
    (mean + shift), and the sum of squares.

    A lane is the columns that one thread loads.  A lane's mean is mean + shift, and the squares are about
    that mean.  They are computed from sums about the mean of the lane's first chunk: a pivot from the lane's
    own values is near its mean in relation to the lane's spread.  For RMSNorm mean and shift are 0, and the
    squares are about 0.
    """
    lanes: tl.constexpr = BLOCK_N // GROUP
    count = tl.zeros((lanes, 1), tl.float32)
    first_count = tl.zeros((lanes, 1), tl.float32)
    mean = tl.zeros((lanes, 1), tl.float32)
    shift = tl.zeros((lanes, 1), tl.float32)
    square = tl.zeros((lanes, 1), tl.float32)
    if len(chunks) == FULL:
        first_count += GROUP
        count += len(chunks) * GROUP
    else:
        left = fragment_cols - tl.arange(0, lanes)[:, None] * GROUP
        first_count += tl.minimum(tl.maximum(left, 0), GROUP).to(tl.float32)
        for i in tl.static_range(len(chunks)):
            count += tl.minimum(tl.maximum(left - i * BLOCK_N, 0), GROUP).to(tl.float32)
    if not IS_RMS:
        first = tl.sum(add_residual_chunk(chunks, residuals, 0), 1, keep_dims=True)
        # The subtraction must use the rounded mean that is returned: a contracted product would be unrounded.
        mean = multiply_rounded(first, 1.0 / tl.maximum(first_count, 1.0))
    for i in tl.static_range(len(chunks)):
        d = _subtract_mean(chunks, residuals, i, mean, fragment_cols, FULL, BLOCK_N, GROUP, IS_RMS)
        if not IS_RMS:
            shift += tl.sum(d, 1, keep_dims=True)
        square += tl.sum(multiply_for_uniform_sum(d, d), 1, keep_dims=True)
    if not IS_RMS:
        inverse = 1.0 / tl.maximum(count, 1.0)
        square = tl.maximum(square - shift * shift * inverse, 0.0, propagate_nan=tl.PropagateNan.ALL)
        shift = multiply_rounded(shift, inverse)
    return count, mean, shift, square


@triton.jit
def _standardise(h, mean, scaled_shift, rstd):
    """Compute (h - mean) * rstd - scaled_shift in one asm statement, so that all operands come from the same
    thread.

    After a reduction tree that merges moments, mean and shift may differ between threads; only their
    combination in one thread is right.  Within the statement no value moves to another thread.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 d; sub.rn.f32 d, $1, $2; fma.rn.f32 $0, d, $3, $4; }",
        "=f,f,f,f,f",
        [h, mean, rstd, -scaled_shift],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_normalised_chunk(
    h, weights, biases, scales, shifts, i: tl.constexpr, y_ptr, y_at, fragment_cols, row, first_col,
    mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, EVICT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Normalise chunk i of a fragment, apply affine step, activation and dropout, and store y.

    h [lanes, GROUP] is the chunk of x + residual.  The fragment starts at column `first_col` of the row, and
    `y_at` elements after y_ptr.  The mean is mean + shift.  `weights`, `biases`, `scales` and
    `shifts` are tuples of one chunk in the dtype of memory, or empty.
    """
    at = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :] + i * BLOCK_N
    mask = make_column_mask(at, fragment_cols, i < FULL)
    if IS_RMS:
        y = h * rstd
    else:
        y = _standardise(h, mean, shift * rstd, rstd)
    if len(weights) > 0:
        y = y * add_weight_offset(widen(weights[0]), WEIGHT_OFFSET)
    if len(biases) > 0:
        y = y + widen(biases[0])
    if len(scales) > 0:
        y = y * add_one(widen(scales[0]))
    if len(shifts) > 0:
        y = y + widen(shifts[0])
    if ACTIVATION != "none" or DROPOUT:
        y = tl.reshape(y, (1, BLOCK_N))
        y = apply_epilogue(
            y,
            row,
            first_col + i * BLOCK_N,
            seed,
            dropout_threshold,
            dropout_scale,
            negative_slope,
            ACTIVATION,
            DROPOUT,
        )
        y = tl.reshape(y, (BLOCK_N // GROUP, GROUP))
    tl.store(y_ptr + y_at + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit
def store_normalised_fragment(
    chunks, residuals, weight_ptr, bias_ptr, parameter_at, scale_ptr, shift_ptr, modulation_at,
    y_ptr, y_at, fragment_cols, row, first_col,
    mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, NARROW: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Normalise all chunks of a loaded fragment by `store_normalised_chunk`, and store y.

    Parameters, from `parameter_at` on in weight and bias and from `modulation_at` on in scale and shift, are loaded
    one chunk ahead.
    """
    # An eviction hint adds five instructions to an access: too many for narrow ones.
    KEEP: tl.constexpr = "" if NARROW else "evict_last"
    DROP: tl.constexpr = "" if NARROW else "evict_first"
    weights = load_fragment(weight_ptr, parameter_at, fragment_cols, FULL, BLOCK_N, 1, GROUP, KEEP)
    biases = load_fragment(bias_ptr, parameter_at, fragment_cols, FULL, BLOCK_N, 1, GROUP, KEEP)
    scales = load_fragment(scale_ptr, modulation_at, fragment_cols, FULL, BLOCK_N, 1, GROUP, KEEP)
    shifts = load_fragment(shift_ptr, modulation_at, fragment_cols, FULL, BLOCK_N, 1, GROUP, KEEP)
    for i in tl.static_range(len(chunks)):
        these_weights = weights
        these_biases = biases
        these_scales = scales
        these_shifts = shifts
        if i + 1 < len(chunks):
            at = (i + 1) * BLOCK_N
            left = fragment_cols - at
            weights = load_fragment(weight_ptr, parameter_at + at, left, FULL - i - 1, BLOCK_N, 1, GROUP, KEEP)
            biases = load_fragment(bias_ptr, parameter_at + at, left, FULL - i - 1, BLOCK_N, 1, GROUP, KEEP)
            scales = load_fragment(scale_ptr, modulation_at + at, left, FULL - i - 1, BLOCK_N, 1, GROUP, KEEP)
            shifts = load_fragment(shift_ptr, modulation_at + at, left, FULL - i - 1, BLOCK_N, 1, GROUP, KEEP)
        store_normalised_chunk(
            add_residual_chunk(chunks, residuals, i), these_weights, these_biases, these_scales, these_shifts,
            i, y_ptr, y_at, fragment_cols, row, first_col,
            mean, shift, rstd, seed, dropout_threshold, dropout_scale, negative_slope,
            FULL, BLOCK_N, GROUP, DROP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT,
        )  # fmt: skip


@triton.jit
def reduce_lane_moments(count, mean, shift, square, EVEN: tl.constexpr):
    """Merge the moments of all lanes, [lanes, 1], into scalars: the mean, in two parts (mean + shift), and the
    sum of squares.

    The mean is mean + shift, of the lanes and of the result.  EVEN: all lanes have the same count.
    """
    if EVEN:
        _, mean, shift, square = tl.reduce((count, mean, shift, square), 0, merge_equal_sets, keep_dims=True)
    else:
        _, mean, shift, square = tl.reduce((count, mean, shift, square), 0, merge_sets, keep_dims=True)
    return tl.sum(mean), tl.sum(shift), tl.sum(square)


@triton.jit
def _compute_two_pass_moments(
    chunks, residuals, fragment_cols,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute a fragment's mean, in two parts (mean + shift), and its sum of squares, as scalars.  This takes
    two passes over the registers.

    The accurate mean is the returned mean plus shift.  This is for narrow accesses, where every element is
    a lane of its own: merging that many moments would cost more.
    """
    n = fragment_cols.to(tl.float32)
    mean = 0.0
    if not IS_RMS:
        total = add_residual_chunk(chunks, residuals, 0)
        for i in tl.static_range(1, len(chunks)):
            total += add_residual_chunk(chunks, residuals, i)
        mean = tl.sum(total) / n
    shifts = tl.zeros((BLOCK_N // GROUP, GROUP), tl.float32)
    squares = tl.zeros((BLOCK_N // GROUP, GROUP), tl.float32)
    # There are two chunks or more: a thread adds the last product to its own, not to another thread's.
    for i in tl.static_range(len(chunks)):
        d = _subtract_mean(chunks, residuals, i, mean, fragment_cols, FULL, BLOCK_N, GROUP, IS_RMS)
        if not IS_RMS:
            shifts += d
        squares += d * d
    if IS_RMS:
        shift = 0.0
        square = tl.sum(tl.sum(squares, 1))
    else:
        shifts, squares = sum_pair(shifts, squares, 1)
        shifts, squares = sum_pair(shifts, squares, 0)
        shift = tl.sum(shifts) / n
        square = tl.maximum(tl.sum(squares) - shift * shift * n, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return mean, shift, square


@triton.jit
def compute_fragment_moments(
    chunks, residuals, fragment_cols, FULL: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    NARROW: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute the moments of a loaded fragment of a row, as scalars: the mean, in two parts (mean + shift),
    and the sum of squares.

    The mean is mean + shift, and the squares are about it; for RMSNorm both are 0.  NARROW: accesses have
    less than 16 bytes.
    """
    if NARROW:
        mean, shift, square = _compute_two_pass_moments(
            chunks, residuals, fragment_cols, FULL, BLOCK_N, GROUP, IS_RMS
        )
    else:
        count, means, shifts, squares = compute_lane_moments(
            chunks, residuals, fragment_cols, FULL, BLOCK_N, GROUP, IS_RMS
        )
        mean, shift, square = reduce_lane_moments(count, means, shifts, squares, len(chunks) == FULL)
    return mean, shift, square
