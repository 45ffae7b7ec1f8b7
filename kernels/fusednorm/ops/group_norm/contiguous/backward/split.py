"""Backward pass of contiguous groups whose programs wait for nothing: sums first, then dx.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradients`.
dy, residual and dresidual_out may be channels-last: their elements are then read one by one.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.integers import cdiv
from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.jit.reductions import sum_pair
from fusednorm.launch.launch import Launch, dropout_arguments
from fusednorm.ops.group_norm.backward_split import sums_and_apply
from fusednorm.ops.group_norm.call import BackwardCall, BackwardConfig
from fusednorm.ops.group_norm.contiguous.runs import load_runs, run_gradient, run_mask, run_position, write_run
from fusednorm.ops.group_norm.gradients import load_gained_affine

_SIZES = [
    "parts", "blocks", "pieces", "channel_units", "groups", "channels", "scale_stride", "seed", "dropout_threshold"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackwardSplit(BackwardConfig):
    """Parts of groups as in `BackwardCooperative`, one a program, in a kernel for sums and one for dx."""

    channels: int
    chunks: int
    pieces: int
    num_warps: int

    def part_positions(self, itemsize: int) -> int:
        """Positions of a part."""
        return self.pieces * self.chunks * (32 * self.num_warps // self.channels) * (16 // itemsize)

    def launches(self, call: BackwardCall) -> list[Launch]:
        sample, itemsize = call.sample, call.x.element_size()
        vec = call.channel_vec
        parts = cdiv(sample.hw, self.part_positions(itemsize))
        blocks = cdiv(sample.channels, self.channels)
        walk = (
            parts, blocks, self.pieces, sample.hw // vec, sample.groups, sample.channels, call.scale_stride,
            *dropout_arguments(call.epilogue),
        )  # fmt: skip
        options = {
            "VEC": vec,
            "CHANNELS": self.channels,
            "LANES": 32 * self.num_warps,
            "GROUP": 16 // itemsize,
            "CHUNKS": self.chunks,
            "EVEN": sample.hw % self.part_positions(itemsize) == 0 and sample.channels % self.channels == 0,
            "EARLY": call.early,
            "num_warps": self.num_warps,
            **call.gradient_options,
        }
        kernels = group_norm_nchw_backward_split_sums_kernel, group_norm_nchw_backward_split_apply_kernel
        return sums_and_apply(call, kernels, (call.n * sample.groups * blocks * parts,), walk, options, parts)


@triton.jit
def _place(
    program, parts, blocks, pieces, hw, groups, channels,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A program's row of statistics, sample, part, first channel in the group, lanes' channels, first position."""
    part = program % parts
    block = (program // parts) % blocks
    row = program // (parts * blocks)
    first_channel = block * CHANNELS
    if CHANNELS == 1:
        lane_channel = 0
    else:
        lane_channel = tl.arange(0, LANES)[:, None] // (LANES // CHANNELS)
    return row, row // groups, part, first_channel, lane_channel, part.to(tl.int64) * pieces * RUN


@triton.jit
def _start_of(
    sample, channel, position, hw, c, lane_channel, lane_position, STEP: tl.constexpr, OTHER: tl.constexpr
):
    """Where a tile starts, where its elements lie behind that, and how far the next tile is, in either layout."""
    if OTHER:
        start = (sample * hw + position) * c + channel
        return start, lane_position.to(tl.int64) * c + lane_channel, c * STEP
    else:
        start = (sample * c + channel) * hw + position
        return start, lane_channel * hw.to(tl.int32) + lane_position, tl.full((), STEP, tl.int32)


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nchw_backward_split_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    parts: tl.int32,
    blocks: tl.int32,
    pieces: tl.int32,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    DY_OTHER: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums of dz and dz * x_hat over a part of CHANNELS channels a program, to [N, parts, C]."""
    let_next_start(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    hw = channel_units * VEC
    c = groups.to(tl.int64) * channels
    row, sample, part, first_channel, lane_channel, first = _place(
        tl.program_id(0), parts, blocks, pieces, hw, groups, channels, CHANNELS, LANES, RUN
    )
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    group_channel = (row - sample * groups) * channels
    position = run_position(LANES, UNITS, GROUP)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    slope, offset = load_gained_affine(
        parameters, group_channel + channel, sample * scale_stride + group_channel + channel, channel_mask, GAIN
    )
    sum_dz = tl.zeros((LANES, 1), tl.float32)
    sum_dz_centred = tl.zeros((LANES, 1), tl.float32)
    for piece in range(0, pieces):
        place = first + piece * RUN
        left = tl.minimum(hw - place, RUN).to(tl.int32)
        start, at, step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, False
        )
        dy_start, dy_at, dy_step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, DY_OTHER
        )
        residual_start, residual_at, residual_step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, RESIDUAL_OTHER
        )
        runs = (
            load_runs(
                dy_ptr, dy_start, dy_at, dy_step, position, left, channel_mask, True,
                EVEN, STEP, CHUNKS, "evict_last",
            ),
            load_runs(x_ptr, start, at, step, position, left, channel_mask, True, EVEN, STEP, CHUNKS, "evict_last"),
            load_runs(
                residual_ptr, residual_start, residual_at, residual_step, position, left, channel_mask, True,
                EVEN, STEP, CHUNKS, "evict_last",
            ),
        )  # fmt: skip
        for i in tl.static_range(CHUNKS):
            centred, dz = run_gradient(
                runs, i, position, left, channel_mask, mean, slope * rstd, offset, sample.to(tl.int64),
                start - sample * c * hw + at, seed, dropout_threshold, dropout_scale,
                EVEN, STEP, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            sum_dz += tl.sum(dz, 1, keep_dims=True)
            sum_dz_centred += tl.sum(dz * centred, 1, keep_dims=True)
    run_dz, run_dz_centred = sum_pair(
        tl.reshape(sum_dz, (CHANNELS, UNITS)), tl.reshape(sum_dz_centred, (CHANNELS, UNITS)), 1, FAST
    )
    run = tl.arange(0, CHANNELS)[:, None]
    slot = (sample * parts + part) * c + group_channel + first_channel + run
    there = first_channel + run < channels
    tl.store(dz_part_ptr + slot, run_dz * (1.0 / GAIN), mask=there)
    tl.store(dz_xhat_part_ptr + slot, run_dz_centred * (rstd * (1.0 / GAIN)), mask=there)


@triton.jit(do_not_specialize=_SIZES)
def group_norm_nchw_backward_split_apply_kernel(
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
    parts: tl.int32,
    blocks: tl.int32,
    pieces: tl.int32,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    DY_OTHER: tl.constexpr,
    RESIDUAL_OTHER: tl.constexpr,
    OUTSIDE_OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """dx of a part of CHANNELS channels a program; what the sums kernel left in the cache comes first."""
    let_next_start(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    hw = channel_units * VEC
    c = groups.to(tl.int64) * channels
    row, sample, _, first_channel, lane_channel, first = _place(
        tl.num_programs(0) - 1 - tl.program_id(0), parts, blocks, pieces, hw, groups, channels, CHANNELS, LANES, RUN
    )
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    group_channel = (row - sample * groups) * channels
    position = run_position(LANES, UNITS, GROUP)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    slope, offset = load_gained_affine(
        parameters, group_channel + channel, sample * scale_stride + group_channel + channel, channel_mask, GAIN
    )
    inverse_size = 1.0 / (channels * hw).to(tl.float32)
    scale = slope * rstd
    await_previous(EARLY)
    constant = tl.load(sum_g_ptr + row) * inverse_size * rstd
    factor = tl.load(sum_g_xhat_ptr + row) * inverse_size * rstd * rstd
    for back in range(0, pieces):
        place = first + (pieces - 1 - back) * RUN
        left = tl.minimum(hw - place, RUN).to(tl.int32)
        start, at, step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, False
        )
        dy_start, dy_at, dy_step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, DY_OTHER
        )
        outside_start, outside_at, outside_step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, OUTSIDE_OTHER
        )
        residual_start, residual_at, residual_step = _start_of(
            sample, group_channel + first_channel, place, hw, c, lane_channel, position, STEP, RESIDUAL_OTHER
        )
        runs = (
            load_runs(
                dy_ptr, dy_start, dy_at, dy_step, position, left, channel_mask, True,
                EVEN, STEP, CHUNKS, "evict_first",
            ),
            load_runs(
                x_ptr, start, at, step, position, left, channel_mask, True, EVEN, STEP, CHUNKS, "evict_first"
            ),
            load_runs(
                residual_ptr, residual_start, residual_at, residual_step, position, left, channel_mask, True,
                EVEN, STEP, CHUNKS, "evict_first",
            ),
        )  # fmt: skip
        outsides = load_runs(
            dresidual_out_ptr, outside_start, outside_at, outside_step, position, left, channel_mask, True,
            EVEN, STEP, CHUNKS, "evict_first",
        )  # fmt: skip
        for i in tl.static_range(CHUNKS):
            centred, dz = run_gradient(
                runs, i, position, left, channel_mask, mean, scale, offset, sample.to(tl.int64),
                start - sample * c * hw + at, seed, dropout_threshold, dropout_scale,
                True, STEP, ACTIVATION, DROPOUT, GAIN, FAST,
            )  # fmt: skip
            write_run(
                centred, dz, dx_ptr, outsides[i : i + 1], start + i * STEP + at,
                run_mask(position + i * STEP, left, channel_mask, True, EVEN),
                scale, constant, factor, FAST, "evict_first",
            )  # fmt: skip
