"""Pieces of channels-last samples that stay in registers as they lie in memory: loading, moments, writing.

A piece is some positions of a block of columns (channels of whole groups): a tuple of chunks [ROWS, CV, VEC], one
access of a thread each, so that a thread keeps its VEC columns for the whole piece.  Its sums are kept apart for
KEEP runs of these columns, each of which lies in one group: 1 where groups are multiples of VEC columns.  What is
of such a run is [.., CV * KEEP, 1].
"""

import triton
import triton.language as tl

from fusednorm._group_norm_affine import slope_and_offset
from fusednorm._reductions import rounded_product, sum_pair
from fusednorm._row_pieces import chunk_of
from fusednorm.epilogue import activate_to, dropout_keep


@triton.jit
def columns_of(block, block_units, column_units, CV: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr):
    """The columns [1, CV, VEC] of a block, and which of its vectors exist: all when EVEN."""
    unit = tl.arange(0, CV)[None, :, None]
    column = (block * block_units + unit) * VEC + tl.arange(0, VEC)[None, None, :]
    if EVEN:
        mask = tl.full(unit.shape, True, tl.int1)
    else:
        mask = unit < tl.minimum(block_units, column_units - block * block_units)
    return column, mask


@triton.jit
def load_rows(
    ptr, base, at, stride, rows, column_mask,
    FULL: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """`rows` positions from ptr + base on; masked elements are 0.  The tuple is empty where ptr is None.

    `at` [ROWS, CV, VEC] are the offsets of a chunk's elements and `stride` leads from position to position.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = column_mask
            if i >= FULL:
                mask = (row + i * ROWS < rows) & column_mask
            start = ptr + base + stride * (i * ROWS)
            chunks = chunks + (tl.load(start + at, mask=mask, other=0.0, eviction_policy=EVICT),)
    return chunks


@triton.jit
def _runs(value, KEEP: tl.constexpr):
    """[ROWS, CV, VEC] as [ROWS, CV * KEEP, VEC // KEEP]."""
    if KEEP == 1:
        return value
    else:
        return tl.reshape(value, (value.shape[0], value.shape[1] * KEEP, value.shape[2] // KEEP))


@triton.jit
def run_moments(
    chunks, residuals, rows, FULL: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr, FAST: tl.constexpr
):
    """Mean and sum of squared deviations of each run of columns over a piece's `rows` positions, [1, CV * KEEP, 1].

    A thread's sums are about a pivot, the mean of its first values; with n positions a thread, what cancels is
    n * 2^-24 of the result at worst.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    first = _runs(chunk_of(chunks, residuals, 0, FAST), KEEP)
    width: tl.constexpr = first.shape[2]
    pivot = tl.sum(first, 2, keep_dims=True) * (1.0 / width)
    sum_1 = tl.zeros(pivot.shape, tl.float32)
    sum_2 = tl.zeros(pivot.shape, tl.float32)
    for i in tl.static_range(len(chunks)):
        d = _runs(chunk_of(chunks, residuals, i, FAST), KEEP) - pivot
        if i >= FULL:
            d = tl.where(row + i * ROWS < rows, d, 0.0)
        sum_1 += tl.sum(d, 2, keep_dims=True)
        sum_2 += tl.sum(d * d, 2, keep_dims=True)
    if len(chunks) == FULL:
        count = tl.full((ROWS, 1, 1), FULL * width, tl.float32)
        total = FULL * ROWS * width + tl.zeros((1, 1, 1), tl.float32)
    else:
        count = (tl.maximum(rows - row + (ROWS - 1), 0) // ROWS * width).to(tl.float32)
        total = (rows * width).to(tl.float32) + tl.zeros((1, 1, 1), tl.float32)
    distance = sum_1 / tl.maximum(count, 1.0)
    rough = tl.sum(rounded_product(count / total + tl.zeros_like(pivot), pivot + distance, FAST), 0, keep_dims=True)
    delta = (pivot - rough) + distance
    weighted = count * delta
    rest, square = sum_pair(weighted, (sum_2 - sum_1 * distance) + weighted * delta, 0, FAST)
    rest = rest / total
    square = tl.maximum(square - total * rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return rough + rest, square


@triton.jit
def fold_to_groups(mean, square, belongs, runs, run_length, FAST: tl.constexpr):
    """Mean and sum of squared deviations of each group, [GROUPS], from those of runs of as many values each.

    Args:
        mean, square: [1, CV * KEEP, 1].
        belongs: [CV * KEEP, GROUPS], whether a run is of a group.
        runs: runs of a group, float32.
        run_length: values of a run, float32.
    """
    shape: tl.constexpr = belongs.shape
    mean = tl.reshape(mean, (shape[0], 1))
    square = tl.reshape(square, (shape[0], 1))
    rough = tl.sum(tl.where(belongs, mean, 0.0), 0, keep_dims=True) / runs
    delta = mean - rough
    rest, square = sum_pair(
        tl.where(belongs, delta, 0.0), tl.where(belongs, square + run_length * delta * delta, 0.0), 0, FAST
    )
    rest = rest / runs
    square = square - run_length * runs * rest * rest
    return tl.reshape(rough + rest, (shape[1],)), tl.reshape(tl.where(square < 0.0, 0.0, square), (shape[1],))


@triton.jit
def merge_members(mean, square, count, total, FAST: tl.constexpr):
    """Mean and sum of squared deviations of each group, [GROUPS], from [SLOTS, GROUPS] of all members.

    `count` [SLOTS, 1] is the values of each member, 0 where there is none; `total` their sum.
    """
    mean = tl.where(count > 0.0, mean, 0.0)
    square = tl.where(count > 0.0, square, 0.0)
    rough = tl.sum(rounded_product(count / total + tl.zeros_like(mean), mean, FAST), 0, keep_dims=True)
    delta = mean - rough
    weighted = count * delta
    rest, square = sum_pair(weighted, square + weighted * delta, 0, FAST)
    rest = rest / total
    square = square - total * rest * rest
    groups: tl.constexpr = mean.shape[1]
    return tl.reshape(rough + rest, (groups,)), tl.reshape(tl.where(square < 0.0, 0.0, square), (groups,))


@triton.jit
def of_runs(value, belongs, CV: tl.constexpr, KEEP: tl.constexpr, VEC: tl.constexpr):
    """A value of each group [GROUPS] for each column, [1, CV, VEC] or, where KEEP is 1, [1, CV, 1]."""
    runs = tl.sum(tl.where(belongs, value[None, :], 0.0), 1)
    if KEEP == 1:
        return tl.reshape(runs, (1, CV, 1))
    else:
        wide = tl.broadcast_to(runs[:, None], (CV * KEEP, VEC // KEEP))
        return tl.reshape(wide, (1, CV, VEC))


@triton.jit
def load_columns(ptr, column, column_mask):
    """(value,) of each column, [1, CV, VEC], or, where ptr is None, ()."""
    loaded = ()
    if ptr is not None:
        loaded = loaded + (tl.load(ptr + column, mask=column_mask, other=0.0),)
    return loaded


@triton.jit
def write_rows(
    chunks, residuals, affine, y_ptr, residual_out_ptr, base, at, stride, rows, column_mask,
    mean, rstd, sample, first, dropout, writer, writers,
    FULL: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y, and h, of a piece; of its chunk i when SHARED only where i % writers == writer.

    Args:
        affine: weight, bias, scale and shift of the columns, a tuple of one [1, CV, VEC] or of none each.
        base, at, stride, rows, column_mask: as in `load_rows`.
        mean, rstd: of each column's group.
        first: where in the sample the piece starts, in elements.
        dropout: seed, threshold and scale.
    """
    a, b = slope_and_offset(affine, rstd, tl.zeros_like(rstd))
    for i in tl.static_range(len(chunks)):
        mask = column_mask
        if SHARED:
            # A branch for each chunk is too much for the compiler.
            mask = (i & (writers - 1) == writer) & column_mask
        _write_chunk(
            chunk_of(chunks, residuals, i, FAST), y_ptr, residual_out_ptr, base, at, stride, rows, mask,
            mean, a, b, sample, first, dropout, i, i < FULL, ROWS, EVICT, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip


@triton.jit
def _write_chunk(
    h, y_ptr, residual_out_ptr, base, at, stride, rows, column_mask, mean, a, b, sample, first, dropout,
    i: tl.constexpr, IS_FULL: tl.constexpr, ROWS: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    mask = column_mask
    if not IS_FULL:
        mask = (tl.arange(0, ROWS)[:, None, None] + i * ROWS < rows) & column_mask
    start = base + stride * (i * ROWS)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + start + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
    y = activate_to((h - mean) * a + b, y_ptr.dtype.element_ty, ACTIVATION, FAST)
    if DROPOUT:
        keep = dropout_keep(dropout[0], sample, first + stride * (i * ROWS) + at, dropout[1])
        y = tl.where(keep, y * dropout[2], 0.0)
    tl.store(y_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
