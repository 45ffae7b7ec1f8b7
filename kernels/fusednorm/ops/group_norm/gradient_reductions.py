"""Reduction of the backward pass's partial sums in a fixed order: a group's two sums, and gradients of parameters.

Partial sums of dz and of dz * x_hat are float32 [N * splits, C].  BESIDE is for a kernel that shares no data with
the previous kernel, which lets it start only when the partial sums are complete.  It runs in parallel with the
previous kernel and ends after it, because later kernels rely on that order.
"""

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch, await_previous_launch
from fusednorm.jit.loads import add_one
from fusednorm.jit.reductions import sum_pair, sum_pair_to_scalars
from fusednorm.launch.launches import Launch, make_early_options
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.sample_shape import SampleShape, allocate_pair
from fusednorm.results import Backward

SUMS_ELEMENTS, SUMS_COLUMNS = 4096, 64
"""The most elements and columns in a tile of the kernel that reduces one group's two sums."""

REDUCE_ROWS, REDUCE_COLUMNS, REDUCE_NUM_WARPS = 512, 8, 8
"""Tile and warps of the kernel that reduces dweight and dbias: many programs, and for most calls one step."""

REDUCE_TWICE_ABOVE, REDUCE_RUNS = 2048, 64
"""Partial rows above which dweight and dbias are reduced in two steps, the first into REDUCE_RUNS rows."""

FEW_ROWS, SOME_ROWS = tl.constexpr(16), tl.constexpr(128)
"""Column sums of at most this many rows use tiles with this many rows: most of a larger tile would be masked."""


def plan_group_reduction(
    parts: tuple[Array, Array],
    affine: AffineParameters,
    sample: SampleShape,
    splits: int,
    sums: tuple[Array, Array],
    early: bool,
) -> Launch:
    """Plan the launch that reduces the sums of channels, [N * splits, C], to two sums per group, [N, groups].

    The two are sums of g = slope * dz and of g * x_hat, from which dx is computed.

    Args:
        parts: the sums of dz and of dz * x_hat over channels.
        sums: the memory for the two results.
        early: whether the kernel may start before the previous kernel ends.
    """
    block_columns = min(SUMS_COLUMNS, next_power_of_2(sample.group_channels))
    block_splits = min(SUMS_ELEMENTS // block_columns, next_power_of_2(splits))
    arguments = (
        *parts, affine.weight, affine.scale, *sums, sample.groups, sample.group_channels, splits,
        affine.sample_stride,
    )  # fmt: skip
    options = {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "num_warps": max(4, min(8, block_splits * block_columns // 256)),
        **make_early_options(early),
    }
    return Launch(group_norm_reduce_sums_kernel, (sums[0].numel(),), arguments, options)


def plan_parameter_reductions(
    parts: tuple[Array | None, Array | None],
    affine: AffineParameters,
    out: Backward[Array],
    splits: int,
    early: bool,
    *,
    overlaps_previous: bool = False,
) -> list[Launch]:
    """Plan the launches that write the gradients of the parameters from partial sums [N * splits, C].

    The list is empty if no gradient is wanted.

    dbias and dweight take two steps if there are many samples, or if scale or shift need a sum for each
    sample.

    Args:
        parts: the sums of dz and of dz * x_hat over channels, or None if no gradient is wanted.
        early: whether a kernel may start before the previous kernel ends.
        overlaps_previous: whether the previous kernel lets the next one start when the partial sums are complete.
    """
    dz, dz_xhat = parts
    if dz is None or all(t is None for t in (out.dbias, out.dweight, out.dscale, out.dshift)):
        return []
    rows, c = dz.shape
    tile = {"ROWS": REDUCE_ROWS, "COLUMNS": REDUCE_COLUMNS, "num_warps": REDUCE_NUM_WARPS}
    options = {**tile, **make_early_options(early)}
    blocks = cdiv(c, REDUCE_COLUMNS)
    launches: list[Launch] = []
    wants_sums = out.dbias is not None or out.dweight is not None
    if affine.scale is not None or affine.shift is not None:
        samples = rows // splits
        sums = allocate_pair(dz, samples, c) if wants_sums else (None, None)
        of_samples = (
            dz, dz_xhat, affine.weight, affine.bias, affine.scale, out.dscale, out.dshift, *sums, splits, c,
            affine.sample_stride,
        )  # fmt: skip
        launches.append(
            Launch(
                group_norm_reduce_samples_kernel,
                (samples * blocks,),
                of_samples,
                options | {"BESIDE": overlaps_previous},
            )
        )
        (dz, dz_xhat), rows = sums, samples
    if dz is None or not wants_sums:
        return launches
    if rows > REDUCE_TWICE_ABOVE:
        runs = REDUCE_RUNS
        fewer = allocate_pair(dz, runs, c)
        of_runs = (dz, dz_xhat, *fewer, rows, c, cdiv(rows, runs))
        launches.append(
            Launch(
                group_norm_reduce_rows_kernel,
                (blocks, runs),
                of_runs,
                options | {"BESIDE": overlaps_previous and not launches},
            )
        )
        (dz, dz_xhat), rows = fewer, runs
    of_all = (dz, dz_xhat, out.dbias, out.dweight, rows, c, rows)
    last = options | {"BESIDE": overlaps_previous and not launches}
    return [*launches, Launch(group_norm_reduce_rows_kernel, (blocks, 1), of_all, last)]


@triton.jit
def _sum_rows(first_ptr, second_ptr, first_row, last_row, columns, column, ROWS: tl.constexpr):
    """Sum the rows first_row <= row < last_row of two [rows, columns] tensors, [1, COLUMNS] each.

    The rows are read in tiles of ROWS; `column` is [1, COLUMNS].
    """
    sum_1 = tl.zeros((ROWS, column.shape[1]), tl.float32)
    sum_2 = tl.zeros((ROWS, column.shape[1]), tl.float32)
    for first in range(first_row, last_row, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * columns + column
        mask = (row < last_row) & (column < columns)
        sum_1 += tl.load(first_ptr + at, mask=mask, other=0.0)
        sum_2 += tl.load(second_ptr + at, mask=mask, other=0.0)
    return sum_pair(sum_1, sum_2, 0)


@triton.jit
def _sum_rows_in_tiles(first_ptr, second_ptr, first_row, last_row, columns, column, ROWS: tl.constexpr):
    """Return the sums of `_sum_rows`, read in tiles of ROWS rows or, if there are few rows, in smaller tiles."""
    rows = last_row - first_row
    if rows <= FEW_ROWS:
        sums = _sum_rows(first_ptr, second_ptr, first_row, last_row, columns, column, FEW_ROWS)
    elif rows <= SOME_ROWS:
        sums = _sum_rows(first_ptr, second_ptr, first_row, last_row, columns, column, SOME_ROWS)
    else:
        sums = _sum_rows(first_ptr, second_ptr, first_row, last_row, columns, column, ROWS)
    return sums


@triton.jit
def _load_slope(weight_ptr, scale_ptr, scale_at, first_column, column, group_columns):
    """Load the slope weight * (1 + scale) of a group's columns, in float32.

    Without weight and scale, the slope is 1.  `column` counts from `first_column`; `scale_at` is the offset
    of the sample in scale.
    """
    mask = column < group_columns
    slope = tl.full(column.shape, 1.0, tl.float32)
    if weight_ptr is not None:
        slope = tl.load(weight_ptr + first_column + column, mask=mask, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + scale_at + first_column + column, mask=mask, other=0.0)
        slope *= add_one(scale)
    return slope


@triton.jit(do_not_specialize=["groups", "group_columns", "splits", "scale_stride"])
def group_norm_reduce_sums_kernel(
    dz_part_ptr,
    dz_xhat_part_ptr,
    weight_ptr,
    scale_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    groups: tl.int32,
    group_columns: tl.int32,
    splits: tl.int32,
    scale_stride: tl.int64,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Reduce the partial sums of a group's channels to the two sums of the group.  Each program has one group.

    The two are sums of g = slope * dz and of g * x_hat over the group.
    """
    allow_next_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    sample = row // groups
    columns = groups.to(tl.int64) * group_columns
    first_column = (row - sample * groups) * group_columns
    base = sample * splits * columns
    split = tl.arange(0, BLOCK_SPLITS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    sum_g = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    sum_g_xhat = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    slope = _load_slope(weight_ptr, scale_ptr, sample * scale_stride, first_column, column, group_columns)
    await_previous_launch(EARLY)
    for first in range(0, group_columns, BLOCK_COLUMNS):
        column_mask = first + column < group_columns
        c = first_column + first + column
        if first > 0:
            slope = _load_slope(
                weight_ptr, scale_ptr, sample * scale_stride, first_column, first + column, group_columns
            )
        for first_split in range(0, splits, BLOCK_SPLITS):
            s = first_split + split
            mask = (s < splits) & column_mask
            at = base + s.to(tl.int64) * columns + c
            sum_g += slope * tl.load(dz_part_ptr + at, mask=mask, other=0.0)
            sum_g_xhat += slope * tl.load(dz_xhat_part_ptr + at, mask=mask, other=0.0)
    elements: tl.constexpr = BLOCK_SPLITS * BLOCK_COLUMNS
    sum_g, sum_g_xhat = sum_pair_to_scalars(tl.reshape(sum_g, (elements,)), tl.reshape(sum_g_xhat, (elements,)))
    tl.store(sum_g_ptr + row, sum_g)
    tl.store(sum_g_xhat_ptr + row, sum_g_xhat)


@triton.jit(do_not_specialize=["splits", "columns", "scale_stride"])
def group_norm_reduce_samples_kernel(
    dz_part_ptr,
    dz_xhat_part_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    dscale_ptr,
    dshift_ptr,
    dz_sum_ptr,
    dz_xhat_sum_ptr,
    splits: tl.int32,
    columns: tl.int32,
    scale_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Reduce partial sums to dscale and dshift.  Each program has one sample and one block of channels.

    Also stores the sample's terms of the sums for dbias and dweight.
    """
    allow_next_launch(EARLY)
    if not BESIDE:
        await_previous_launch(EARLY)
    # One axis, which has room for many samples and for many blocks; adjacent programs read adjacent columns.
    blocks = tl.cdiv(columns, COLUMNS)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column_mask = column < columns
    first = sample * splits
    dz, dz_xhat = _sum_rows_in_tiles(dz_part_ptr, dz_xhat_part_ptr, first, first + splits, columns, column, ROWS)
    at = sample * columns + column
    if dshift_ptr is not None:
        tl.store(dshift_ptr + at, dz.to(dshift_ptr.dtype.element_ty), mask=column_mask)
    factor = tl.full((1, COLUMNS), 1.0, tl.float32)
    if scale_ptr is not None:
        factor += tl.load(scale_ptr + sample * scale_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    if dscale_ptr is not None:
        dscale = dz_xhat
        if weight_ptr is not None:
            dscale *= tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            dscale += dz * tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
        tl.store(dscale_ptr + at, dscale.to(dscale_ptr.dtype.element_ty), mask=column_mask)
    if dz_sum_ptr is not None:
        tl.store(dz_sum_ptr + at, dz * factor, mask=column_mask)
        tl.store(dz_xhat_sum_ptr + at, dz_xhat * factor, mask=column_mask)
    if BESIDE:
        await_previous_launch(EARLY)


@triton.jit(do_not_specialize=["rows", "columns", "rows_a_program"])
def group_norm_reduce_rows_kernel(
    bias_part_ptr,
    weight_part_ptr,
    dbias_ptr,
    dweight_ptr,
    rows: tl.int64,
    columns: tl.int32,
    rows_a_program: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Sum two [rows, columns] tensors over rows, and cast the sums to the outputs' dtypes.  Each program has
    one run of rows.

    With one run of all rows the results are dbias and dweight.  With many runs they are shorter [runs,
    columns] tensors, which a second launch sums.
    """
    allow_next_launch(EARLY)
    if not BESIDE:
        await_previous_launch(EARLY)
    run = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column_mask = column < columns
    first_row = run * rows_a_program
    last_row = tl.minimum(first_row + rows_a_program, rows)
    bias, weight = _sum_rows_in_tiles(bias_part_ptr, weight_part_ptr, first_row, last_row, columns, column, ROWS)
    out = run * columns + column
    if dbias_ptr is not None:
        tl.store(dbias_ptr + out, bias.to(dbias_ptr.dtype.element_ty), mask=column_mask)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + out, weight.to(dweight_ptr.dtype.element_ty), mask=column_mask)
    if BESIDE:
        await_previous_launch(EARLY)
