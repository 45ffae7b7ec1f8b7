"""Backward pass of contiguous groups that several programs share.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradients`.  This file is long
because of its one kernel: the half that computes sums and the half that writes dx share nearly every value.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.devices.device import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import let_next_start
from fusednorm.jit.exchange import collect, first_tag, leave, post, slot_of
from fusednorm.jit.reductions import multiply_terms, rounded_product, sum_pair, total_pair
from fusednorm.launch.launch import Launch, can_prefetch, make_cooperative_options
from fusednorm.launch.workspace import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.contiguous.runs import prefetch_runs, run_position
from fusednorm.ops.group_norm.gradients import (
    load_gained_affine,
    load_gradient_tiles,
    load_tiles,
    tile_gradient,
    tile_mask,
    write_tile,
)
from fusednorm.ops.group_norm.reduce_sums import plan_parameter_reductions
from fusednorm.ops.group_norm.sample import MAX_OFFSET, SampleShape, can_stay_in_l2


@dataclass(frozen=True, slots=True)
class GroupNormBackwardCooperative(GroupNormBackwardConfig):
    """Programs that share a contiguous group, parts of `channels` neighbouring channels each.

    A part is `fragments` pieces, a piece `chunks` tiles along its channels, a tile one 16-byte vector of x per
    thread. `programs_per_sm` programs are resident on a multiprocessor, and exchange the group's sums.  A program
    reads a piece again `lag` pieces after it posted the part's sums, and prefetches the piece `ahead` pieces later
    into L2.
    """

    channels: int
    chunks: int
    fragments: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def channel_threads(self) -> int:
        """The number of adjacent threads along a channel."""
        return 32 * self.num_warps // self.channels

    def count_range_positions(self, itemsize: int) -> int:
        """Return the number of positions of a part."""
        return self.fragments * self.chunks * self.channel_threads * (16 // itemsize)

    def count_members(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of programs that share a group."""
        parts = -(-sample.hw // self.count_range_positions(itemsize))
        return parts * -(-sample.channels // self.channels)

    def compute_padded_length(self, sample: SampleShape, itemsize: int) -> int:
        """Compute the number of elements of all members' tiles."""
        return self.count_members(sample, itemsize) * self.channels * self.count_range_positions(itemsize)

    def can_run(self, sample: SampleShape, itemsize: int, multiprocessors: int) -> bool:
        """Return whether a group's members are resident together, and L2 keeps a piece until its second read."""
        programs = self.programs_per_sm * multiprocessors
        return (
            sample.hw * itemsize % 16 == 0
            and self.count_members(sample, itemsize) <= programs
            and can_stay_in_l2(32 * self.num_warps, self.chunks * (self.fragments + self.lag), programs)
            and self.channels * sample.hw < MAX_OFFSET
        )

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        sample, itemsize = call.sample, call.x.element_size()
        vec = call.channel_vec
        members = self.count_members(sample, itemsize)
        parts = cdiv(sample.hw, self.count_range_positions(itemsize))
        resident = count_multiprocessors(call.x.device) * self.programs_per_sm
        rows = call.n * sample.groups
        # The device refuses the launch if a team is not resident.
        teams = max(1, min(rows, resident // members))
        depth = next_power_of_2(2 * cdiv(self.lag, self.fragments))
        partial = call.allocate_wanted_partials(parts)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *partial,
            get_exchange_buffer(call.x.device, depth * teams * members),
            rows, members, parts, sample.hw // vec, sample.groups, sample.channels, call.affine.sample_stride,
            *call.options.dropout_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "CHANNELS": self.channels,
            "LANES": 32 * self.num_warps,
            "GROUP": 16 // itemsize,
            "CHUNKS": self.chunks,
            "PIECES": self.fragments,
            "EVEN": sample.hw % self.count_range_positions(itemsize) == 0 and sample.channels % self.channels == 0,
            "SLOTS": next_power_of_2(members),
            "DEPTH": depth,
            "LAG": self.lag,
            "AHEAD": self.ahead if can_prefetch(vec, call.x, call.dy) else 0,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **make_cooperative_options(self),
            **call.gradient_options,
        }
        return [
            Launch(group_norm_nchw_backward_cooperative_kernel, (teams * members,), arguments, options),
            *plan_parameter_reductions(partial, call.affine, call.out, parts, call.can_start_early),
        ]


@triton.jit(
    do_not_specialize=[
        "rows", "members", "parts", "channel_units", "groups", "channels", "scale_stride",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_backward_cooperative_kernel(
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
    exchange_ptr,
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
    EARLY: tl.constexpr,
):
    """Write dx and partial sums of `rows` groups, each shared by `members` programs.

    There are `parts` parts for every CHANNELS channels.

    A part is PIECES pieces of CHUNKS tiles along each channel.  A program reads every piece twice: first for sums
    over the group, which it posts after the last piece, and LAG pieces later, when the other members have posted
    theirs, out of L1 or L2 for dx.  It writes sums over channels to [N, parts, C].  Programs are persistent; the
    launch must be cooperative.
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

    start = first_tag(exchange_ptr)
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
        tiles = load_gradient_tiles(
            dy_ptr, x_ptr, residual_ptr, start_at, at, STEP, position, left, channel_mask, wanted,
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
            prefetch_runs(x_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)
            prefetch_runs(dy_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)

        if step >= BEHIND:
            late_turn = (step - BEHIND) // PIECES
            late_piece = (step - BEHIND) % PIECES
            late_row = team + late_turn * teams
            late_at = late_row * group_size + inside + late_piece * RUN
            late_left = hw - first - late_piece * RUN
            tile = load_gradient_tiles(
                dy_ptr, x_ptr, residual_ptr, late_at, at, STEP, position, late_left, channel_mask, True,
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
                slots = slot_of(exchange_ptr, team, tag, tl.where(present, other, 0), members, DEPTH)
                part_1, part_2, _ = collect(slots, tag)
                sum_g, sum_g_xhat = total_pair(tl.where(present, part_1, 0.0), tl.where(present, part_2, 0.0))
                constant = sum_g * inverse_size
                factor = sum_g_xhat * inverse_size
            scale = late_slope * late_rstd
            late_constant = constant * late_rstd
            late_factor = factor * late_rstd * late_rstd
            late_position = (late_row - late_sample * groups) * group_size + inside + late_piece * RUN
            for i in tl.static_range(CHUNKS):
                this = tile
                if i + 1 < CHUNKS:
                    tile = load_gradient_tiles(
                        dy_ptr, x_ptr, residual_ptr, late_at + (i + 1) * STEP, at, STEP, position,
                        late_left - (i + 1) * STEP, channel_mask, True, EVEN, STEP, 1, "evict_first",
                    )  # fmt: skip
                centred, dz = tile_gradient(
                    this, 0, position, late_left - i * STEP, channel_mask,
                    late_mean, scale, late_offset, late_sample.to(tl.int64),
                    late_position + i * STEP + at, seed, dropout_threshold, dropout_scale,
                    True, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                here = late_left - i * STEP
                outside = load_tiles(
                    dresidual_out_ptr, late_at + i * STEP, at, STEP, position, here, channel_mask, True,
                    EVEN, STEP, 1, "evict_first",
                )  # fmt: skip
                write_tile(
                    centred, dz, dx_ptr, outside, late_at + i * STEP + at,
                    tile_mask(position, here, channel_mask, True, EVEN),
                    scale, late_constant, late_factor, "evict_first",
                )  # fmt: skip

        if wanted:
            sum_dz = tl.where(piece > 0, sum_dz, 0.0)
            sum_dz_centred = tl.where(piece > 0, sum_dz_centred, 0.0)
            sample_position = (row - sample * groups) * group_size + inside + piece * RUN
            for i in tl.static_range(CHUNKS):
                centred, dz = tile_gradient(
                    tiles, i, position + i * STEP, left, channel_mask,
                    mean, slope * rstd, offset, sample.to(tl.int64), sample_position + at + i * STEP,
                    seed, dropout_threshold, dropout_scale,
                    EVEN, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                sum_dz += tl.sum(dz, 1, keep_dims=True)
                sum_dz_centred += tl.sum(multiply_terms(dz, centred), 1, keep_dims=True)
            if piece == PIECES - 1:
                if CHANNELS == 1:
                    run_dz, run_dz_xhat = total_pair(
                        tl.reshape(sum_dz, (LANES,)), tl.reshape(sum_dz_centred, (LANES,))
                    )
                    run_dz_xhat *= rstd
                    g = run_dz * slope
                    g_xhat = run_dz_xhat * slope
                else:
                    lane_g = rounded_product(sum_dz, slope)
                    lane_g_xhat = rounded_product(sum_dz_centred, slope * rstd)
                    g, g_xhat = total_pair(tl.reshape(lane_g, (LANES,)), tl.reshape(lane_g_xhat, (LANES,)))
                tag = start + turn.to(tl.uint32)
                post(slot_of(exchange_ptr, team, tag, member, members, DEPTH), tag, g, g_xhat, 0.0)
                if dz_part_ptr is not None:
                    slot = (sample * parts + part).to(tl.int64) * c + (row - sample * groups) * channels
                    slot += first_channel
                    if CHANNELS == 1:
                        tl.store(dz_part_ptr + slot, run_dz * (1.0 / GAIN))
                        tl.store(dz_xhat_part_ptr + slot, run_dz_xhat * (1.0 / GAIN))
                    else:
                        run_dz, run_dz_xhat = sum_pair(
                            tl.reshape(sum_dz, (CHANNELS, UNITS)), tl.reshape(sum_dz_centred, (CHANNELS, UNITS)),
                            1,
                        )  # fmt: skip
                        run = tl.arange(0, CHANNELS)[:, None]
                        there = first_channel + run < channels
                        tl.store(dz_part_ptr + slot + run, run_dz * (1.0 / GAIN), mask=there)
                        tl.store(dz_xhat_part_ptr + slot + run, run_dz_xhat * (rstd * (1.0 / GAIN)), mask=there)

    leave(exchange_ptr, last_tag)
