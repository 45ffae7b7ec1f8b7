"""Backward pass of blocks of channels-last columns whose programs wait for nothing: sums first, then dx.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradients`.
dy, residual and dresidual_out may be contiguous: their elements are then read one by one.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.jit.moments import widened
from fusednorm.jit.reductions import sum_pair
from fusednorm.launch.launch import Launch, dropout_arguments
from fusednorm.ops.group_norm.backward_split import sums_and_apply
from fusednorm.ops.group_norm.call import BackwardCall, BackwardConfig
from fusednorm.ops.group_norm.channels_last.blocks import (
    load_statistic,
    load_tiles,
    most_touched,
    tile_gradient,
    tile_mask,
    vector_mask,
)
from fusednorm.ops.group_norm.gradients import load_gained_affine
from fusednorm.ops.group_norm.sample import vector_width

_SIZES = ["splits", "blocks", "pieces", "hw", "column_units", "groups", "channels", "seed", "dropout_threshold"]


@dataclass(frozen=True, slots=True)
class BackwardColumns(BackwardConfig):
    """Slabs of `columns` columns, a power of two, one a program, in a kernel for sums and one for dx.

    A slab is `pieces` pieces of `chunks` tiles of as many positions as one vector a thread makes.
    """

    columns: int
    chunks: int
    pieces: int
    num_warps: int

    def rows(self, vec: int) -> int:
        """Positions of a tile of vectors of `vec` elements."""
        return 32 * self.num_warps * vec // self.columns

    def launches(self, call: BackwardCall) -> list[Launch]:
        sample = call.sample
        vec = vector_width(call.x.element_size(), sample.c)
        slab_rows = self.pieces * self.chunks * self.rows(vec)
        splits = cdiv(sample.hw, slab_rows)
        blocks = cdiv(sample.c, self.columns)
        walk = (
            splits, blocks, self.pieces, sample.hw, sample.c // vec, sample.groups, sample.channels,
            call.scale_stride, *dropout_arguments(call.epilogue),
        )  # fmt: skip
        options = {
            "GROUP": vec,
            "LANES": 32 * self.num_warps,
            "CV": self.columns // vec,
            "CHUNKS": self.chunks,
            "EVEN": sample.c % self.columns == 0 and sample.hw % slab_rows == 0,
            "LABELS": most_touched(sample.channels, vec),
            "EARLY": call.early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        kernels = group_norm_nhwc_backward_columns_sums_kernel, group_norm_nhwc_backward_columns_apply_kernel
        return sums_and_apply(call, kernels, (call.n * splits * blocks,), walk, options, splits)


@triton.jit
def _start_of(sample, column, position, hw, c, lane_column, lane_row, ROWS: tl.constexpr, OTHER: tl.constexpr):
    """Where a tile starts, where its elements lie behind that, and how far the next tile is, in either layout."""
    if OTHER:
        return (sample * c + column) * hw + position, lane_column * hw + lane_row, tl.full((), ROWS, tl.int64)
    else:
        return (sample * hw + position) * c + column, lane_row * c.to(tl.int32) + lane_column, c * ROWS


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nhwc_backward_columns_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    splits: tl.int32,
    blocks: tl.int32,
    pieces: tl.int32,
    hw: tl.int64,
    column_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CV: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    LABELS: tl.constexpr,
    DY_OTHER: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of dz and dz * x_hat of CV vectors of columns over a slab of positions a program, to [N, splits, C]."""
    let_next_start(EARLY)
    ROWS: tl.constexpr = LANES // CV
    RUN: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = CV * GROUP
    c = column_units * GROUP
    block = tl.program_id(0) % blocks
    split = (tl.program_id(0) // blocks) % splits
    sample = tl.program_id(0) // (blocks * splits)
    lane = tl.arange(0, LANES)[:, None]
    row = lane // CV
    vector = lane % CV
    block_first = block * WIDTH
    vector_first = block_first + vector * GROUP
    lane_column = vector * GROUP + tl.arange(0, GROUP)[None, :]
    vector_group = vector_first // channels
    place = (block_first + lane_column) // channels - vector_group
    columns = vector_mask(vector, CV, vector_first, c, EVEN)
    mean = load_statistic(mean_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    rstd = load_statistic(rstd_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    channel = block_first + lane_column
    slope, offset = load_gained_affine(parameters, channel, sample * scale_stride + channel, columns, GAIN)
    scale = slope * rstd
    first = split.to(tl.int64) * pieces * RUN
    sum_dz = tl.zeros((LANES, GROUP), tl.float32)
    sum_dz_centred = tl.zeros((LANES, GROUP), tl.float32)
    for piece in range(0, pieces):
        position = first + piece * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _start_of(sample, block_first, position, hw, c, lane_column, row, ROWS, False)
        dy_start, dy_at, dy_step = _start_of(sample, block_first, position, hw, c, lane_column, row, ROWS, DY_OTHER)
        residual_start, residual_at, residual_step = _start_of(
            sample, block_first, position, hw, c, lane_column, row, ROWS, RESIDUAL_OTHER
        )
        tiles = (
            load_tiles(
                dy_ptr, dy_start, dy_at, dy_step, row, left, columns, True, EVEN, ROWS, CHUNKS, "evict_last"
            ),
            load_tiles(x_ptr, start, at, step, row, left, columns, True, EVEN, ROWS, CHUNKS, "evict_last"),
            load_tiles(
                residual_ptr, residual_start, residual_at, residual_step, row, left, columns, True,
                EVEN, ROWS, CHUNKS, "evict_last",
            ),
        )  # fmt: skip
        for i in tl.static_range(CHUNKS):
            centred, dz = tile_gradient(
                tiles, i, row + i * ROWS, left, columns, mean, scale, offset, sample.to(tl.int64),
                start - sample * c * hw + i * step + at, seed, dropout_threshold, dropout_scale,
                EVEN, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            sum_dz += dz
            sum_dz_centred += dz * centred
    channel_dz, channel_dz_xhat = sum_pair(
        tl.reshape(sum_dz, (ROWS, WIDTH)), tl.reshape(sum_dz_centred * rstd, (ROWS, WIDTH)), 0, FAST
    )
    block_column = block_first + tl.arange(0, WIDTH)[None, :]
    slot = (sample * splits + split) * c + block_column
    tl.store(dz_part_ptr + slot, channel_dz * (1.0 / GAIN), mask=block_column < c)
    tl.store(dz_xhat_part_ptr + slot, channel_dz_xhat * (1.0 / GAIN), mask=block_column < c)


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nhwc_backward_columns_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    dx_ptr,
    splits: tl.int32,
    blocks: tl.int32,
    pieces: tl.int32,
    hw: tl.int64,
    column_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CV: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    LABELS: tl.constexpr,
    DY_OTHER: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    OUTSIDE_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """dx of CV vectors of columns over a slab a program; what the sums kernel left in the cache comes first."""
    let_next_start(EARLY)
    ROWS: tl.constexpr = LANES // CV
    RUN: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = CV * GROUP
    c = column_units * GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % blocks
    split = (program // blocks) % splits
    sample = program // (blocks * splits)
    lane = tl.arange(0, LANES)[:, None]
    row = lane // CV
    vector = lane % CV
    block_first = block * WIDTH
    vector_first = block_first + vector * GROUP
    lane_column = vector * GROUP + tl.arange(0, GROUP)[None, :]
    vector_group = vector_first // channels
    place = (block_first + lane_column) // channels - vector_group
    columns = vector_mask(vector, CV, vector_first, c, EVEN)
    mean = load_statistic(mean_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    rstd = load_statistic(rstd_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    channel = block_first + lane_column
    slope, offset = load_gained_affine(parameters, channel, sample * scale_stride + channel, columns, GAIN)
    await_previous(EARLY)
    sum_g = load_statistic(sum_g_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    sum_g_xhat = load_statistic(sum_g_xhat_ptr, sample * groups, vector_group, groups - 1, place, LABELS)
    scale = slope * rstd
    inverse_size = 1.0 / (channels * hw).to(tl.float32)
    constant = sum_g * inverse_size * rstd
    factor = sum_g_xhat * inverse_size * rstd * rstd
    first = split.to(tl.int64) * pieces * RUN
    for back in range(0, pieces):
        position = first + (pieces - 1 - back) * RUN
        left = tl.minimum(hw - position, RUN).to(tl.int32)
        start, at, step = _start_of(sample, block_first, position, hw, c, lane_column, row, ROWS, False)
        dy_start, dy_at, dy_step = _start_of(sample, block_first, position, hw, c, lane_column, row, ROWS, DY_OTHER)
        outside_start, outside_at, outside_step = _start_of(
            sample, block_first, position, hw, c, lane_column, row, ROWS, OUTSIDE_OTHER
        )
        residual_start, residual_at, residual_step = _start_of(
            sample, block_first, position, hw, c, lane_column, row, ROWS, RESIDUAL_OTHER
        )
        tiles = (
            load_tiles(
                dy_ptr, dy_start, dy_at, dy_step, row, left, columns, True, EVEN, ROWS, CHUNKS, "evict_first"
            ),
            load_tiles(x_ptr, start, at, step, row, left, columns, True, EVEN, ROWS, CHUNKS, "evict_first"),
            load_tiles(
                residual_ptr, residual_start, residual_at, residual_step, row, left, columns, True,
                EVEN, ROWS, CHUNKS, "evict_first",
            ),
        )  # fmt: skip
        outsides = load_tiles(
            dresidual_out_ptr, outside_start, outside_at, outside_step, row, left, columns, True,
            EVEN, ROWS, CHUNKS, "evict_first",
        )  # fmt: skip
        for i in tl.static_range(CHUNKS):
            centred, dz = tile_gradient(
                tiles, i, row + i * ROWS, left, columns, mean, scale, offset, sample.to(tl.int64),
                start - sample * c * hw + i * step + at, seed, dropout_threshold, dropout_scale,
                True, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            dx = dz * scale - (centred * factor + constant)
            if len(outsides) > 0:
                dx += widened(outsides[i], FAST)
            mask = tile_mask(row + i * ROWS, left, columns, True, EVEN)
            tl.store(
                dx_ptr + start + i * step + at, dx.to(dx_ptr.dtype.element_ty), mask=mask,
                eviction_policy="evict_first",
            )  # fmt: skip
