"""Forward kernels of GroupNorm where channels come last in memory: [N, positions, C].

A program owns a block of columns (channels) and walks positions in tiles [ROWS, CV, VEC]: VEC channels are
one 128-bit access of one thread, and a thread keeps its channels for the whole walk, so parameters and
statistics are loaded once.  Groups of any width share tiles: moments are kept per channel and folded to
groups at the end.

Each row of a tile holds its own pivot of a channel; as in the contiguous kernels, with n values a row of the
tile what cancels is n * 2^-24 of the result at worst.
"""

import triton
import triton.language as tl

from fusednorm._early_start import await_previous, let_next_start
from fusednorm._group_norm_affine import load_masked_affine
from fusednorm._group_norm_tiles import load_sum
from fusednorm._reductions import rounded_product, sum_pair
from fusednorm.epilogue import activate_to, dropout_keep


@triton.jit
def _residual_at(at, row, column, hw, OTHER: tl.constexpr):
    """Where the residual of positions `row` of each column lies: where x does, or, OTHER, with positions last."""
    if OTHER:
        return column * hw + row
    else:
        return at


@triton.jit
def channel_moments(
    x_ptr,
    residual_ptr,
    first_row,
    last_row,
    hw,
    row_stride,
    column,
    column_mask,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
):
    """Mean and sum of squared deviations of each column over first_row <= row < last_row, [1, CV, VEC] each.

    Args:
        x_ptr, residual_ptr: the sample's first element.
        hw, OTHER: positions of the sample, and whether the residual is contiguous, as `_residual_at` takes them.
        column: [1, CV, VEC] int32.
        column_mask: [1, CV, 1], which vectors of columns exist.
    """
    STEP: tl.constexpr = ROWS * UNROLL
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    rows = last_row - first_row
    mask = (row < rows) & column_mask
    offset = first_row * row_stride + at
    residual_at = _residual_at(offset, first_row + row, column, hw, OTHER)
    pivot = load_sum(x_ptr, residual_ptr, offset, residual_at, mask, "evict_last")
    sum_1 = tl.zeros(at.shape, tl.float32)
    sum_2 = tl.zeros(at.shape, tl.float32)
    full = rows // STEP
    for step in range(0, full):
        for k in tl.static_range(UNROLL):
            start = first_row + step * STEP + k * ROWS
            offset = start * row_stride + at
            residual_at = _residual_at(offset, start + row, column, hw, OTHER)
            d = load_sum(x_ptr, residual_ptr, offset, residual_at, column_mask, "evict_last") - pivot
            sum_1 += d
            sum_2 += d * d
    for tail in range(first_row + full * STEP, last_row, ROWS):
        mask = (tail + row < last_row) & column_mask
        offset = tail * row_stride + at
        residual_at = _residual_at(offset, tail + row, column, hw, OTHER)
        h = load_sum(x_ptr, residual_ptr, offset, residual_at, mask, "evict_last")
        d = tl.where(mask, h - pivot, 0.0)
        sum_1 += d
        sum_2 += d * d

    count = ((rows + (ROWS - 1) - row) // ROWS).to(tl.float32)
    total = rows.to(tl.float32)
    lane_shift = sum_1 / tl.maximum(count, 1.0)
    rough = tl.sum(rounded_product(count / total, pivot + lane_shift, FAST), 0, keep_dims=True)
    delta = (pivot - rough) + lane_shift
    weighted = count * delta
    shift, square = sum_pair(weighted, (sum_2 - sum_1 * lane_shift) + weighted * delta, 0, FAST)
    shift /= total
    square = square - total * shift * shift
    # maximum would lose a NaN.
    return rough + shift, tl.where(square < 0.0, 0.0, square)


@triton.jit
def sum_same_label(value, label):
    """For each of [COLUMNS], the sum of the values that bear its label."""
    return tl.sum(tl.where(label[:, None] == label[None, :], value[None, :], 0.0), 1)


@triton.jit
def slab_moments(
    x_ptr,
    residual_ptr,
    rows,
    row_stride,
    column,
    column_mask,
    label,
    channels,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    FAST: tl.constexpr,
):
    """Each column's group's mean and variance, [COLUMNS], from whole groups by Chan's formula."""
    mean, square = channel_moments(
        x_ptr, residual_ptr, 0, rows, rows, row_stride, column, column_mask, ROWS, UNROLL, False, FAST
    )
    mean = tl.reshape(mean, label.shape)
    square = tl.reshape(square, label.shape)
    length = rows.to(tl.float32)
    rough = sum_same_label(mean, label) / channels
    group_mean = rough + sum_same_label(mean - rough, label) / channels
    # Squares about the corrected mean: nothing is subtracted afterwards, so equal channels have no spread at all.
    delta = mean - group_mean
    square = sum_same_label(square + length * delta * delta, label)
    return group_mean, square / (length * channels)


@triton.jit
def _normalise_rows(
    x_ptr,
    residual_ptr,
    y_ptr,
    residual_out_ptr,
    mean,
    scale,
    bias,
    sample,
    first_row,
    last_row,
    hw,
    row_stride,
    column,
    column_mask,
    seed,
    dropout_threshold,
    dropout_scale,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write first_row <= row < last_row of a block of columns, the last rows first, UNROLL tiles a step.

    The loads of a step come first, so that all are in flight while one tile at a time is held in float32.
    `mean`, `scale` and `bias` are [1, CV, VEC]; pointers are the sample's.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    at = row.to(tl.int64) * row_stride + column
    STEP: tl.constexpr = ROWS * UNROLL
    steps = tl.cdiv(last_row - first_row, STEP)
    for step in range(0, steps):
        start = first_row + (steps - 1 - step) * STEP
        tiles = ()
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            residual_at = _residual_at(offset, start + k * ROWS + row, column, hw, OTHER)
            tiles = tiles + (load_sum(x_ptr, residual_ptr, offset, residual_at, mask, "evict_first"),)
        for k in tl.static_range(UNROLL):
            mask = (start + k * ROWS + row < last_row) & column_mask
            offset = (start + k * ROWS) * row_stride + at
            h = tiles[k]
            if residual_out_ptr is not None:
                tl.store(residual_out_ptr + offset, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
            y = activate_to((h - mean) * scale + bias, y_ptr.dtype.element_ty, ACTIVATION, FAST)
            if DROPOUT:
                keep = dropout_keep(seed, sample, offset, dropout_threshold)
                y = tl.where(keep, y * dropout_scale, 0.0)
            tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def load_statistic(ptr, column, column_mask):
    """A float32 statistic of each column's group."""
    return tl.load(ptr + column, mask=column_mask, other=0.0)


@triton.jit
def block_of_columns(first_unit, end_unit, CV: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr):
    """The columns [1, CV, VEC] of CV vectors from first_unit on, and which vectors exist: all when EVEN.

    A constant mask is folded away.
    """
    unit = first_unit + tl.arange(0, CV)[None, :, None]
    column = unit * VEC + tl.arange(0, VEC)[None, None, :]
    if EVEN:
        mask = tl.full(unit.shape, True, tl.int1)
    else:
        mask = unit < end_unit
    return column, mask


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "slab_groups", "slabs"])
def group_norm_nhwc_slab_kernel(
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
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    slab_groups: tl.int32,
    slabs: tl.int32,
    eps: tl.float32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """A slab of whole groups of one sample a program, in two sweeps, the second backwards out of L2."""
    program = tl.program_id(0)
    sample = (program // slabs).to(tl.int64)
    slab = program % slabs
    c = column_units * VEC
    slab_units = slab_groups * channels // VEC
    first_unit = slab * slab_units
    end_unit = tl.minimum(first_unit + slab_units, column_units)
    column, column_mask = block_of_columns(first_unit, end_unit, CV, VEC, EVEN)
    label = tl.arange(0, CV * VEC) // channels
    base = sample * hw * c
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
        residual_out_ptr += base

    mean, variance = slab_moments(
        x_ptr, residual_ptr, hw, c.to(tl.int64), column, column_mask, label, channels, ROWS, UNROLL, FAST
    )
    rstd = 1.0 / tl.sqrt(variance + eps)
    if mean_ptr is not None:
        lane = tl.arange(0, CV * VEC)
        group = sample * groups + slab * slab_groups + label
        first_of_group = (lane % channels == 0) & (lane < (end_unit - first_unit) * VEC)
        tl.store(mean_ptr + group, mean, mask=first_of_group)
        tl.store(rstd_ptr + group, rstd, mask=first_of_group)

    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    weight, bias = load_masked_affine(parameters, column, sample * scale_stride + column, column_mask)
    _normalise_rows(
        x_ptr, residual_ptr, y_ptr + base, residual_out_ptr,
        tl.reshape(mean, (1, CV, VEC)), tl.reshape(rstd, (1, CV, VEC)) * weight, bias,
        sample, 0, hw, hw, c.to(tl.int64), column, column_mask, seed, dropout_threshold, dropout_scale,
        ROWS, UNROLL, False, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["hw", "column_units", "splits", "split_rows", "blocks"])
def group_norm_nhwc_stats_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    hw: tl.int64,
    column_units: tl.int32,
    splits: tl.int32,
    split_rows: tl.int64,
    blocks: tl.int32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of a block of columns over one split of the positions; parts lie as [N, splits, C]."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // splits
    split = run - sample * splits
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    base = sample * hw * c
    first_row = split * split_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
    mean, square = channel_moments(
        x_ptr, residual_ptr, first_row, tl.minimum(first_row + split_rows, hw), hw, c.to(tl.int64),
        column, column_mask, ROWS, UNROLL, RESIDUAL_OTHER, FAST,
    )  # fmt: skip
    tl.store(mean_part_ptr + run * c + column, mean, mask=column_mask)
    tl.store(square_part_ptr + run * c + column, square, mask=column_mask)


@triton.jit(do_not_specialize=["hw", "column_units", "groups", "channels", "runs", "run_rows", "blocks"])
def group_norm_nhwc_apply_kernel(
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
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    runs: tl.int32,
    run_rows: tl.int64,
    blocks: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one run of positions of a block of columns; programs walk the tensor backwards."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    run = (program // blocks).to(tl.int64)
    sample = run // runs
    c = column_units * VEC
    column, column_mask = block_of_columns(block * CV, column_units, CV, VEC, EVEN)
    group = sample * groups + column // channels
    base = sample * hw * c
    first_row = (run - sample * runs) * run_rows
    x_ptr += base
    if residual_ptr is not None:
        residual_ptr += base
        residual_out_ptr += base

    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    weight, bias = load_masked_affine(parameters, column, sample * scale_stride + column, column_mask)
    await_previous(EARLY)
    scale = load_statistic(rstd_ptr, group, column_mask) * weight
    _normalise_rows(
        x_ptr, residual_ptr, y_ptr + base, residual_out_ptr,
        load_statistic(mean_ptr, group, column_mask), scale, bias,
        sample, first_row, tl.minimum(first_row + run_rows, hw), hw, c.to(tl.int64), column, column_mask,
        seed, dropout_threshold, dropout_scale, ROWS, 1, RESIDUAL_OTHER, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
