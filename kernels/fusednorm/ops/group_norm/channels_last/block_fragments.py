"""Fragments of channels-last samples that stay in registers in the dtype of memory: loads, moments, stores.

A fragment is some positions of a block of columns (channels of full groups): a tuple of chunks [LANES, VEC], with
one lane per thread, which loads a vector of VEC adjacent columns at once.  CV adjacent lanes hold a block's columns
of one position, the next CV lanes those of the next of ROWS positions.  (For [ROWS, CV, VEC] the compiler would
give adjacent threads adjacent positions.)  A lane has the same columns in the whole fragment.  It has SUMS sums,
one for each run of its columns, each within one group; SUMS is 1 if groups are multiples of VEC columns.
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl

from fusednorm.integers import next_power_of_2
from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import add_residual_chunk
from fusednorm.jit.moments import compute_mean_term, convert_moments_to_sums, convert_sums_to_moments, merge_moments
from fusednorm.jit.reductions import sum_pair
from fusednorm.ops.group_norm.affine_step import compute_slope_and_offset
from fusednorm.ops.group_norm.channels_last.column_blocks import split_into_runs, sum_squares_of_runs
from fusednorm.ops.group_norm.sample_shape import SampleShape, compute_access_width


@dataclass(frozen=True, slots=True)
class BlockTile:
    """The shape of the tile that a program's threads load at once from a block of adjacent channels.

    Attributes:
        vec: channels of one access; each thread makes one access.
        threads_per_position: threads that load one position, a power of two: those after the block's last channel
            are idle.
        positions: positions that are loaded at once.
        sums_per_thread: runs of equal length into which a thread's `vec` channels are divided, so that each
            run is within one group and has sums of its own; 1 if every access is within one group.
    """

    vec: int
    threads_per_position: int
    positions: int
    sums_per_thread: int


def make_block_tile(sample: SampleShape, block_groups: int, num_warps: int, itemsize: int) -> BlockTile:
    """Choose the tile for blocks of `block_groups` groups: vector width, threads per position, and positions.

    One access of each thread covers all channels of the block at one or more positions.
    """
    columns = block_groups * sample.group_channels
    vec = compute_access_width(itemsize, sample.c, columns)
    vectors = next_power_of_2(columns // vec)
    return BlockTile(vec, vectors, max(1, 32 * num_warps // vectors), vec // gcd(vec, sample.group_channels))


def make_block_options(
    sample: SampleShape, block_groups: int, num_warps: int, tile: BlockTile
) -> dict[str, object]:
    """Make the launch options of kernels over blocks of `block_groups` groups: constexprs and number of warps."""
    columns = block_groups * sample.group_channels
    return {
        "VEC": tile.vec,
        "CV": tile.threads_per_position,
        "ROWS": tile.positions,
        "EVEN": columns == tile.threads_per_position * tile.vec and sample.c % columns == 0,
        "SUMS": tile.sums_per_thread,
        "GROUPS": next_power_of_2(block_groups),
        "num_warps": num_warps,
    }


@triton.jit
def store_group_statistics(mean_ptr, rstd_ptr, mean, rest, rstd, at, mask):
    """Store each group's mean and rstd where `mask` is true.  The stored mean is the sum of `mean` and `rest`.

    If mean_ptr is None, nothing is stored, because the statistics are not wanted.
    """
    if mean_ptr is not None:
        tl.store(mean_ptr + at, mean + rest, mask=mask)
        tl.store(rstd_ptr + at, rstd, mask=mask)


@triton.jit
def compute_lane_rows(ROWS: tl.constexpr, CV: tl.constexpr):
    """Compute each lane's position in a chunk, [LANES, 1]."""
    return tl.arange(0, ROWS * CV)[:, None] // CV


@triton.jit
def compute_lane_columns(
    block, block_units, column_units, ROWS: tl.constexpr, CV: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr
):
    """Compute the columns of the sample that each lane loads, [LANES, VEC], and the mask of lanes whose
    vectors exist.

    The second result is a mask, [LANES, 1]; if all vectors exist (EVEN), a constant that the compiler
    removes.
    """
    unit = tl.arange(0, ROWS * CV)[:, None] % CV
    column = (block * block_units + unit) * VEC + tl.arange(0, VEC)[None, :]
    if EVEN:
        mask = tl.full(unit.shape, True, tl.int1)
    else:
        mask = unit < tl.minimum(block_units, column_units - block * block_units)
    return column, mask


@triton.jit
def load_block_rows(
    ptr, base, at, stride, rows, column_mask,
    FULL: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load `rows` positions of a block of columns as CHUNKS chunks [LANES, VEC]; () if ptr is None.

    The block starts at ptr + base, `at` [LANES, VEC] are the offsets of a chunk's elements, and `stride` is
    between positions.  Masked elements are 0; the first FULL chunks have all ROWS positions.
    """
    row = compute_lane_rows(ROWS, at.shape[0] // ROWS)
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
def compute_group_moments(
    chunks, residuals, rows, channels, membership,
    FULL: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute each group's moments over a fragment.  They are the mean, in two parts (mean + rest), and the
    sum of squared deviations.

    The results are mean, rest and squares, [GROUPS] each: the group's mean is mean + rest.  The fragment is
    `rows` positions of a block of columns, held in registers.  A thread's sums are about a pivot, the mean of
    its first values; with n positions per thread, the error from cancellation is at most n * 2^-24 of the
    result.  All threads' sums are then merged as in `merge_moments`: first over the positions of a run, then
    over the runs of a group.  A run is adjacent columns of a lane within one group.

    Args:
        membership: [CV * SUMS, GROUPS], whether a run of columns belongs to a group of `channels` columns.
    """
    first = split_into_runs(add_residual_chunk(chunks, residuals, 0), SUMS)
    lanes: tl.constexpr = first.shape[0]
    width: tl.constexpr = first.shape[2]
    row = compute_lane_rows(ROWS, lanes // ROWS)
    pivot = tl.sum(first, 2) * (1.0 / width)
    sum_1 = tl.zeros(pivot.shape, tl.float32)
    sum_2 = tl.zeros(pivot.shape, tl.float32)
    for i in tl.static_range(len(chunks)):
        d = split_into_runs(add_residual_chunk(chunks, residuals, i), SUMS) - pivot[:, :, None]
        if i >= FULL:
            d = tl.where((row + i * ROWS < rows)[:, :, None], d, 0.0)
        sum_1 += tl.sum(d, 2)
        sum_2 += sum_squares_of_runs(d)
    if len(chunks) == FULL:
        count = tl.full((lanes, 1), FULL * width, tl.float32)
    else:
        count = (tl.maximum(rows - row + (ROWS - 1), 0) // ROWS * width).to(tl.float32)
    total = rows.to(tl.float32) * channels
    distance = sum_1 / tl.maximum(count, 1.0)
    share = compute_mean_term(count, pivot, distance, total)
    share = tl.reshape(tl.sum(_reshape_by_position(share, ROWS), 0), (membership.shape[0], 1))
    rough = tl.sum(tl.where(membership, share, 0.0), 0)
    sum_1, sum_2 = convert_moments_to_sums(
        _expand_groups_to_runs(rough, membership, ROWS, SUMS), count, pivot, distance, sum_2 - sum_1 * distance
    )
    sum_1, sum_2 = sum_pair(_reshape_by_position(sum_1, ROWS), _reshape_by_position(sum_2, ROWS), 0)
    sum_1 = tl.where(membership, tl.reshape(sum_1, (membership.shape[0], 1)), 0.0)
    sum_2 = tl.where(membership, tl.reshape(sum_2, (membership.shape[0], 1)), 0.0)
    sum_1, sum_2 = sum_pair(sum_1, sum_2, 0)
    rest, square = convert_sums_to_moments(total, sum_1, sum_2)
    return rough, tl.reshape(rest, rough.shape), tl.reshape(square, rough.shape)


@triton.jit
def _reshape_by_position(value, ROWS: tl.constexpr):
    """Reshape a value for each run of each lane, [LANES, SUMS], to [ROWS, CV * SUMS]."""
    return tl.reshape(value, (ROWS, value.shape[0] // ROWS * value.shape[1]))


@triton.jit
def _expand_groups_to_runs(value, membership, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """Expand one value per group, [GROUPS], to a value for each run of columns in each lane, [LANES, SUMS].

    A run is adjacent columns of a lane within one group.
    """
    runs: tl.constexpr = membership.shape[0]
    value = tl.sum(tl.where(membership, value[None, :], 0.0), 1)
    return tl.reshape(tl.broadcast_to(value[None, :], (ROWS, runs)), (ROWS * runs // SUMS, SUMS))


@triton.jit
def merge_member_moments(mean, rest, square, count, total):
    """Merge the moments that several programs computed of the same groups, [SLOTS, GROUPS], into [GROUPS].

    The moments are mean, `rest` and sum of squared deviations.  `count` [SLOTS, 1] is the number of values
    of each program (member), 0 in unused slots; `total` is their sum.
    """
    used = count > 0.0
    groups: tl.constexpr = mean.shape[1]
    mean, rest, square = merge_moments(
        count, tl.where(used, mean, 0.0), tl.where(used, rest, 0.0), tl.where(used, square, 0.0), total, 0
    )
    return tl.reshape(mean, (groups,)), tl.reshape(rest, (groups,)), tl.reshape(square, (groups,))


@triton.jit
def expand_groups_to_columns(value, membership, ROWS: tl.constexpr, SUMS: tl.constexpr, VEC: tl.constexpr):
    """Expand one value per group, [GROUPS], to a value for each column of each lane, [LANES, VEC]."""
    runs: tl.constexpr = membership.shape[0]
    value = tl.sum(tl.where(membership, value[None, :], 0.0), 1)
    wide = tl.broadcast_to(value[None, :, None], (ROWS, runs, VEC // SUMS))
    return tl.reshape(wide, (ROWS * runs // SUMS, VEC))


@triton.jit
def load_columns_as_tuple(ptr, column, column_mask):
    """Load one value per column as a tuple of one [LANES, VEC] tile.  If ptr is None, return an empty tuple."""
    loaded = ()
    if ptr is not None:
        loaded = loaded + (tl.load(ptr + column, mask=column_mask, other=0.0),)
    return loaded


@triton.jit
def store_normalised_rows(
    chunks, residuals, affine, y_ptr, residual_out_ptr, base, at, stride, rows, column_mask,
    mean, rest, rstd, sample, first, epilogue, writer, writers,
    FULL: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Normalise a fragment of a block, apply affine step, activation and dropout, and store y and h.

    A fragment is some positions of a block of columns, held in registers; h is x + residual.  If SHARED,
    several programs write the same block, and this one stores only the chunks i with i % writers == writer.

    Args:
        affine: weight, bias, scale and shift of the columns, each a tuple of one [LANES, VEC] or an empty
            tuple.
        base, at, stride, rows, column_mask: as in `load_block_rows`.
        mean, rest, rstd: statistics of each column's group; its mean is mean + rest.
        first: the fragment's start in the sample, in elements.
        epilogue: seed, threshold and scale of dropout, and the negative slope.
    """
    a, b = compute_slope_and_offset(affine, rstd, rest)
    for i in tl.static_range(len(chunks)):
        mask = column_mask
        if SHARED:
            # A mask, because the compiler does not cope with a branch for each chunk.
            mask = (i & (writers - 1) == writer) & column_mask
        _store_normalised_chunk(
            add_residual_chunk(chunks, residuals, i), y_ptr, residual_out_ptr, base, at, stride, rows, mask,
            mean, a, b, sample, first, epilogue, i, i < FULL, ROWS, EVICT, ACTIVATION, DROPOUT,
        )  # fmt: skip


@triton.jit
def _store_normalised_chunk(
    h, y_ptr, residual_out_ptr, base, at, stride, rows, column_mask, mean, a, b, sample, first, epilogue,
    i: tl.constexpr, IS_FULL: tl.constexpr, ROWS: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute y = act((h - mean) * a + b) of chunk i, apply dropout, and store y and h.

    h [LANES, VEC] is x + residual, and is not stored if residual_out_ptr is None; the other arguments are
    those of `store_normalised_rows`.
    """
    mask = column_mask
    if not IS_FULL:
        mask = (compute_lane_rows(ROWS, at.shape[0] // ROWS) + i * ROWS < rows) & column_mask
    start = base + stride * (i * ROWS)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + start + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
    y = activate_for_dtype((h - mean) * a + b, epilogue[3], y_ptr.dtype.element_ty, ACTIVATION)
    if DROPOUT:
        keep = compute_keep_mask(epilogue[0], sample, first + stride * (i * ROWS) + at, epilogue[1])
        y = tl.where(keep, y * epilogue[2], 0.0)
    tl.store(y_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
