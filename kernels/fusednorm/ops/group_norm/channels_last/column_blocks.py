"""Blocks of channels-last columns in the backward kernels, their vectors, and runs of a vector.

A tile is [LANES, GROUP]: one lane per thread, which loads a vector of GROUP adjacent columns at once.  CV adjacent
lanes hold a block's columns of one position, the next CV lanes those of the next position.  A lane has the same
columns at all positions.
"""

import triton
import triton.language as tl

from fusednorm.jit.reductions import multiply_for_uniform_sum

_ASK = """{
.reg .pred asker;
setp.ne.s32 asker, $2, 0;
@asker prefetch.global.L2 [$1];
mov.u32 $0, 0;
}"""
ASK: tl.constexpr = tl.constexpr(_ASK)


def count_max_overlaps(interval_size: int, window_size: int) -> int:
    """Return how many adjacent intervals one window overlaps at most, such as groups in a vector of columns.

    Consecutive intervals have `interval_size` elements each; the window has `window_size` elements and starts at a
    multiple of its size.
    """
    if window_size % interval_size == 0:
        return window_size // interval_size
    return 1 if interval_size % window_size == 0 else (window_size - 2) // interval_size + 2


@triton.jit
def make_vector_mask(vector, block_units, first_column, c, EVEN: tl.constexpr):
    """Make the mask of those vectors of a block that lie within the sample's columns.  If all do (EVEN), it is
    a constant.

    The compiler removes the constant.  `vector` is a vector's index in the block of `block_units` vectors,
    `first_column` its first column in the sample.
    """
    if EVEN:
        return tl.full(vector.shape, True, tl.int1)
    else:
        return (vector < block_units) & (first_column < c)


@triton.jit
def select_for_columns(values, group_index):
    """Select each column's value from the values of the few groups that the column's vector touches.

    `values` is a tuple of one value or [LANES, 1] tile for each of these groups; `group_index` [LANES,
    GROUP] is the index of a column's group in the tuple.
    """
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(group_index == i, values[i], value)
    return value


@triton.jit
def load_group_statistic(ptr, first_group, vector_group, last_group, group_index, LABELS: tl.constexpr):
    """Load mean or rstd of each column's group, in float32.

    A vector touches at most LABELS groups from `vector_group` on; `group_index` is the index of a column's
    group among them, as in `select_for_columns`.  `first_group` is the offset of group 0 in the tensor; no
    group after `last_group` is read.
    """
    values = ()
    for i in tl.static_range(LABELS):
        values = values + (tl.load(ptr + first_group + tl.minimum(vector_group + i, last_group)),)
    return select_for_columns(values, group_index)


@triton.jit
def prefetch_addresses(ptrs, mask):
    """Prefetch into L2 the cache line at each address of a tile where `mask` is true."""
    tl.inline_asm_elementwise(
        ASK, "=r,l,r", [ptrs.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def split_into_runs(value, RUNS: tl.constexpr):
    """Reshape [LANES, VEC] to runs of adjacent columns, [LANES, RUNS, VEC // RUNS]."""
    return tl.reshape(value, (value.shape[0], RUNS, value.shape[1] // RUNS))


@triton.jit
def sum_squares_of_runs(d):
    """Sum the squares of each run of adjacent columns: [LANES, RUNS] from [LANES, RUNS, VEC // RUNS]."""
    if d.shape[2] == 1:
        # Nothing is added over lanes, and the caller's addition can be an FMA.
        return tl.sum(d * d, 2)
    else:
        return tl.sum(multiply_for_uniform_sum(d, d), 2)
