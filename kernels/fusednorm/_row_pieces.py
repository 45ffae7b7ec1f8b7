"""Pieces of rows that stay in registers as they lie in memory: loading, moments, writing.

A 16-bit piece takes half the registers of its float32 values; it is converted anew wherever it is used.
"""

import triton
import triton.language as tl

from fusednorm._layer_norm_forward_kernels import finish
from fusednorm._row_moments import column_mask, offset_weight, widened


@triton.jit
def merge_even(count_a, mean_a, square_a, count_b, mean_b, square_b):
    """Chan's merge of the moments of two sets of as many values: of a reduction whose tree is a full one."""
    delta = mean_b - mean_a
    return count_a + count_b, mean_a + delta * 0.5, square_a + square_b + delta * delta * (count_a * 0.5)


@triton.jit
def merge(count_a, mean_a, square_a, count_b, mean_b, square_b):
    """Chan's merge of the moments of two sets of values, of which either may be empty."""
    count = count_a + count_b
    delta = mean_b - mean_a
    share = count_b / tl.maximum(count, 1.0)
    return count, mean_a + delta * share, square_a + square_b + delta * delta * (count_a * share)


@triton.jit
def first_value(x_ptr, residual_ptr, row, x_row_size, residual_row_size, IS_RMS: tl.constexpr):
    """A value that all members know: means are told as distances from it, so that none of their digits is lost."""
    value = 0.0
    if not IS_RMS:
        value = tl.load(x_ptr + row * x_row_size).to(tl.float32)
        if residual_ptr is not None:
            value += tl.load(residual_ptr + row * residual_row_size).to(tl.float32)
    return value


@triton.jit
def load_piece(
    ptr, piece_cols, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """CHUNKS chunks of BLOCK_N columns as they lie in memory, a tuple of [lanes, GROUP]; nothing where ptr is None.

    A lane is the GROUP columns of each chunk that one thread loads at once.
    """
    col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = column_mask(col + i * BLOCK_N, piece_cols, EVEN)
            chunks = chunks + (tl.load(ptr + i * BLOCK_N + col, mask=mask, other=0.0, eviction_policy=EVICT),)
    return chunks


@triton.jit
def _chunk(chunks, residuals, i: tl.constexpr, FAST: tl.constexpr):
    """Chunk i of h in float32."""
    h = widened(chunks[i], FAST)
    if len(residuals) > 0:
        h += widened(residuals[i], FAST)
    return h


@triton.jit
def piece_moments(
    chunks, residuals, pivot, piece_cols,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, IS_RMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squares of each lane of a piece, [lanes, 1]; the mean is told from `pivot` on.

    For RMSNorm the squares are about 0.
    """
    lanes: tl.constexpr = BLOCK_N // GROUP
    col = tl.arange(0, lanes)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    count = tl.zeros((lanes, 1), tl.float32)
    mean = tl.zeros((lanes, 1), tl.float32)
    square = tl.zeros((lanes, 1), tl.float32)
    if EVEN:
        count += len(chunks) * GROUP
    else:
        for i in tl.static_range(len(chunks)):
            count += tl.sum((col + i * BLOCK_N < piece_cols).to(tl.float32), 1, keep_dims=True)
    if not IS_RMS:
        for i in tl.static_range(len(chunks)):
            d = _chunk(chunks, residuals, i, FAST) - pivot
            if not EVEN:
                d = tl.where(col + i * BLOCK_N < piece_cols, d, 0.0)
            mean += tl.sum(d, 1, keep_dims=True)
        if EVEN:
            mean = mean * (1.0 / (len(chunks) * GROUP))
        else:
            mean = mean / tl.maximum(count, 1.0)
    for i in tl.static_range(len(chunks)):
        d = _chunk(chunks, residuals, i, FAST)
        if not IS_RMS:
            d = (d - pivot) - mean
            if not EVEN:
                d = tl.where(col + i * BLOCK_N < piece_cols, d, 0.0)
        square += tl.sum(d * d, 1, keep_dims=True)
    return count, mean, square


@triton.jit
def write_piece(
    chunks, residuals, weights, biases, y_ptr, residual_out_ptr, piece_cols, row, first_col, main, rest, rstd,
    seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y, and h, of a piece that starts at column `first_col`; the pointers are to its place."""
    col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in tl.static_range(len(chunks)):
        at = col + i * BLOCK_N
        mask = column_mask(at, piece_cols, EVEN)
        h = _chunk(chunks, residuals, i, FAST)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        if IS_RMS:
            y = h * rstd
        elif chunks[i].dtype == tl.float32 or len(residuals) > 0:
            y = (h - main) * rstd - rest * rstd
        else:
            # One instruction; what it loses is below a 16-bit input's own rounding.
            y = h * rstd - (main * rstd + rest * rstd)
        if len(weights) > 0:
            y = y * offset_weight(widened(weights[i], FAST), WEIGHT_OFFSET)
        if len(biases) > 0:
            y = y + widened(biases[i], FAST)
        if ACTIVATION != "none" or DROPOUT:
            y = tl.reshape(y, (1, BLOCK_N))
            y = finish(
                y,
                row,
                first_col + i * BLOCK_N,
                seed,
                dropout_threshold,
                dropout_scale,
                ACTIVATION,
                DROPOUT,
                FAST,
            )
            y = tl.reshape(y, (BLOCK_N // GROUP, GROUP))
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def total_moments(count, mean, square, EVEN: tl.constexpr):
    """Mean and sum of squares of all lanes together, as scalars; the arguments are [lanes, 1]."""
    if EVEN:
        _, mean, square = tl.reduce((count, mean, square), 0, merge_even, keep_dims=True)
    else:
        _, mean, square = tl.reduce((count, mean, square), 0, merge, keep_dims=True)
    return tl.sum(mean), tl.sum(square)
