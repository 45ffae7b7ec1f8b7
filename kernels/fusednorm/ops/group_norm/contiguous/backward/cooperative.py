"""Backward kernel of GroupNorm for contiguous groups that several programs share.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradients`.
"""

import triton
import triton.language as tl

from fusednorm.jit.early_start import let_next_start
from fusednorm.jit.exchange import collect, first_tag, leave, post, slot_of
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.reductions import sum_pair, total_pair
from fusednorm.ops.group_norm.contiguous.runs import (
    load_gradient_runs,
    load_runs,
    run_gradient,
    run_mask,
    run_position,
    write_run,
)
from fusednorm.ops.group_norm.gradients import load_gained_affine


@triton.jit
def _prefetch_runs(ptr, channel_size, channels_left, left, RUN: tl.constexpr, CHANNELS: tl.constexpr):
    """Ask for RUN positions, or `left` if fewer, of each channel of a piece."""
    count = tl.minimum(left, RUN)
    if CHANNELS == 1:
        if count > 0:
            prefetch(ptr, count)
    else:
        there = tl.minimum(channels_left, CHANNELS)
        if channel_size <= RUN:
            prefetch(ptr, there * channel_size)
        elif count > 0:
            for channel in range(0, there):
                prefetch(ptr + channel * channel_size, count)


@triton.jit(
    do_not_specialize=[
        "rows", "members", "parts", "channel_units", "groups", "channels", "scale_stride",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_backward_shared_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    parameters,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    mailbox_ptr,
    rows: tl.int32,
    members: tl.int32,
    parts: tl.int32,
    channel_units: tl.int32,
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
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A group, of `rows` in all, belongs to `members` programs: `parts` parts of every CHANNELS channels.

    A part is PIECES pieces of CHUNKS tiles along each channel.  Every piece is read twice: once for sums over the
    group, which are posted after the last one, and LAG pieces after that, by when the other members' sums have
    come, out of L1 or L2 for dx.  Sums over channels go to [N, parts, C].  Programs are persistent; the launch must
    be cooperative.
    """
    let_next_start(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    BEHIND: tl.constexpr = PIECES - 1 + LAG
    hw = channel_units * VEC
    group_size = channels * hw.to(tl.int64)
    c = groups * channels
    inverse_size = 1.0 / group_size.to(tl.float32)
    team = tl.program_id(0) // members
    teams = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    part = member % parts
    first_channel = (member // parts) * CHANNELS
    first = part * (PIECES * RUN)
    if CHANNELS == 1:
        lane_channel = 0
    else:
        lane_channel = tl.arange(0, LANES)[:, None] // UNITS
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    position = run_position(LANES, UNITS, GROUP)
    at = lane_channel * hw + position
    inside = first_channel * hw.to(tl.int64) + first
    other = tl.arange(0, SLOTS)
    present = other < members

    start = first_tag(mailbox_ptr)
    last_tag = start + tl.cdiv(rows, teams).to(tl.uint32) - 1
    turns = tl.cdiv(rows - team, teams)
    steps = turns * PIECES
    sum_dz = tl.zeros((LANES, 1), tl.float32)
    sum_dz_centred = tl.zeros((LANES, 1), tl.float32)
    constant = tl.full((), 0.0, tl.float32)
    factor = tl.full((), 0.0, tl.float32)

    for step in range(0, steps + BEHIND):
        wanted = step < steps
        turn = step // PIECES
        piece = step % PIECES
        row = team + turn * teams
        start_at = row * group_size + inside + piece * RUN
        left = hw - first - piece * RUN
        piece_runs = load_gradient_runs(
            dy_ptr, x_ptr, residual_ptr, start_at, at, position, left, channel_mask, wanted,
            EVEN, STEP, CHUNKS, "evict_last",
        )  # fmt: skip
        mean = tl.load(mean_ptr + row, mask=wanted, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=wanted, other=0.0)
        sample = row // groups
        group_channel = (row - sample * groups) * channels + channel
        slope, offset = load_gained_affine(
            parameters, group_channel, sample * scale_stride + group_channel, channel_mask & wanted, GAIN
        )
        if AHEAD > 0 and step + AHEAD < steps:
            turn_ahead = (step + AHEAD) // PIECES
            run_ahead = ((step + AHEAD) % PIECES) * RUN
            at_ahead = (team + turn_ahead * teams) * group_size + inside + run_ahead
            left_ahead = hw - first - run_ahead
            channels_left = channels - first_channel
            _prefetch_runs(x_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)
            _prefetch_runs(dy_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)

        if step >= BEHIND:
            late_turn = (step - BEHIND) // PIECES
            late_piece = (step - BEHIND) % PIECES
            late_row = team + late_turn * teams
            late_at = late_row * group_size + inside + late_piece * RUN
            late_left = hw - first - late_piece * RUN
            tile = load_gradient_runs(
                dy_ptr, x_ptr, residual_ptr, late_at, at, position, late_left, channel_mask, True,
                EVEN, STEP, 1, "evict_first",
            )  # fmt: skip
            late_mean = tl.load(mean_ptr + late_row)
            late_rstd = tl.load(rstd_ptr + late_row)
            late_sample = late_row // groups
            late_channel = (late_row - late_sample * groups) * channels + channel
            late_slope, late_offset = load_gained_affine(
                parameters, late_channel, late_sample * scale_stride + late_channel, channel_mask, GAIN
            )
            if late_piece == 0:
                tag = start + late_turn.to(tl.uint32)
                part_1, part_2, _ = collect(
                    slot_of(mailbox_ptr, team, tag, tl.where(present, other, 0), members, DEPTH), tag
                )
                sum_g, sum_g_xhat = total_pair(tl.where(present, part_1, 0.0), tl.where(present, part_2, 0.0), FAST)
                constant = sum_g * inverse_size
                factor = sum_g_xhat * inverse_size
            scale = late_slope * late_rstd
            late_constant = constant * late_rstd
            late_factor = factor * late_rstd * late_rstd
            late_position = (late_row - late_sample * groups) * group_size + inside + late_piece * RUN
            for i in tl.static_range(CHUNKS):
                this = tile
                if i + 1 < CHUNKS:
                    tile = load_gradient_runs(
                        dy_ptr, x_ptr, residual_ptr, late_at + (i + 1) * STEP, at, position,
                        late_left - (i + 1) * STEP, channel_mask, True, EVEN, STEP, 1, "evict_first",
                    )  # fmt: skip
                centred, dz = run_gradient(
                    this, 0, position, late_left - i * STEP, channel_mask,
                    late_mean, scale, late_offset, late_sample.to(tl.int64),
                    late_position + i * STEP + at, seed, dropout_threshold, dropout_scale,
                    True, STEP, ACTIVATION, DROPOUT, GAIN, FAST,
                )  # fmt: skip
                here = late_left - i * STEP
                outside = load_runs(
                    dresidual_out_ptr, late_at + i * STEP, at, STEP, position, here, channel_mask, True,
                    EVEN, STEP, 1, "evict_first",
                )  # fmt: skip
                write_run(
                    centred, dz, dx_ptr, outside, late_at + i * STEP + at,
                    run_mask(position, here, channel_mask, True, EVEN),
                    scale, late_constant, late_factor, FAST, "evict_first",
                )  # fmt: skip

        if wanted:
            sum_dz = tl.where(piece > 0, sum_dz, 0.0)
            sum_dz_centred = tl.where(piece > 0, sum_dz_centred, 0.0)
            sample_position = (row - sample * groups) * group_size + inside + piece * RUN
            for i in tl.static_range(CHUNKS):
                centred, dz = run_gradient(
                    piece_runs, i, position, left, channel_mask,
                    mean, slope * rstd, offset, sample.to(tl.int64), sample_position + at,
                    seed, dropout_threshold, dropout_scale,
                    EVEN, STEP, ACTIVATION, DROPOUT, GAIN, FAST,
                )  # fmt: skip
                sum_dz += tl.sum(dz, 1, keep_dims=True)
                sum_dz_centred += tl.sum(dz * centred, 1, keep_dims=True)
            if piece == PIECES - 1:
                if CHANNELS == 1:
                    run_dz, run_dz_xhat = total_pair(
                        tl.reshape(sum_dz, (LANES,)), tl.reshape(sum_dz_centred, (LANES,)), FAST
                    )
                    run_dz_xhat *= rstd
                    g = run_dz * slope
                    g_xhat = run_dz_xhat * slope
                else:
                    g, g_xhat = total_pair(
                        tl.reshape(sum_dz * slope, (LANES,)),
                        tl.reshape(sum_dz_centred * (slope * rstd), (LANES,)),
                        FAST,
                    )
                tag = start + turn.to(tl.uint32)
                post(slot_of(mailbox_ptr, team, tag, member, members, DEPTH), tag, g, g_xhat, 0.0)
                if dz_part_ptr is not None:
                    slot = (
                        (sample * parts + part).to(tl.int64) * c
                        + (row - sample * groups) * channels
                        + first_channel
                    )
                    if CHANNELS == 1:
                        tl.store(dz_part_ptr + slot, run_dz * (1.0 / GAIN))
                        tl.store(dz_xhat_part_ptr + slot, run_dz_xhat * (1.0 / GAIN))
                    else:
                        run_dz, run_dz_xhat = sum_pair(
                            tl.reshape(sum_dz, (CHANNELS, UNITS)),
                            tl.reshape(sum_dz_centred, (CHANNELS, UNITS)),
                            1,
                            FAST,
                        )
                        run = tl.arange(0, CHANNELS)[:, None]
                        there = first_channel + run < channels
                        tl.store(dz_part_ptr + slot + run, run_dz * (1.0 / GAIN), mask=there)
                        tl.store(dz_xhat_part_ptr + slot + run, run_dz_xhat * (rstd * (1.0 / GAIN)), mask=there)

    leave(mailbox_ptr, last_tag)
