"""Backward pass of contiguous groups that several programs share.

The formulas are in `contiguous.backward.tile`; z's slope and offset, and GAIN, in `gradient_tiles`.  This file is
long because of its one kernel: the half that computes sums and the half that writes dx share nearly every value.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.program_exchange import collect_slots, end_exchange, load_first_tag, locate_slot, post_scalars
from fusednorm.jit.reductions import multiply_for_uniform_sum, multiply_rounded, sum_pair_to_scalars
from fusednorm.launch.launches import Launch, can_prefetch, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.contiguous.channel_runs import (
    compute_run_positions,
    prefetch_channel_runs,
    store_channel_sums,
)
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import (
    compute_tile_centred_and_dz,
    load_backward_tiles,
    load_scaled_slope_and_offset,
    load_tiles,
    make_tile_mask,
    store_tile_gradient,
)
from fusednorm.ops.group_norm.sample_shape import MAX_OFFSET, SampleShape, can_stay_in_l2


@dataclass(frozen=True, slots=True)
class GroupNormBackwardCooperative(GroupNormBackwardConfig):
    """A configuration in which several resident programs share one contiguous group and exchange its sums.

    Each program has a part of the group: a range of positions of `channels` neighbouring channels.  A part
    is `fragments` fragments, a fragment `chunks` tiles along its channels, a tile one 16-byte vector of x
    per thread.  `programs_per_sm` programs are resident on a multiprocessor.  A program reads a fragment
    again `lag` fragments after it posted the part's sums, and prefetches the fragment `ahead` fragments
    later into L2.
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
        return parts * -(-sample.group_channels // self.channels)

    def compute_padded_length(self, sample: SampleShape, itemsize: int) -> int:
        """Compute the number of elements of all members' tiles."""
        return self.count_members(sample, itemsize) * self.channels * self.count_range_positions(itemsize)

    def can_run(self, sample: SampleShape, itemsize: int, multiprocessors: int) -> bool:
        """Return whether this configuration can process samples of this shape on a device with
        `multiprocessors` multiprocessors.

        The programs that share a group must be resident together, L2 must keep a fragment until its second read,
        a channel must be a multiple of 16 bytes, and offsets must fit 32 bits.
        """
        programs = self.programs_per_sm * multiprocessors
        return (
            sample.hw * itemsize % 16 == 0
            and self.count_members(sample, itemsize) <= programs
            and can_stay_in_l2(32 * self.num_warps, self.chunks * (self.fragments + self.lag), programs)
            and self.channels * sample.hw < MAX_OFFSET
        )

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the cooperative launch for dx and partial sums, and the launches for parameter gradients."""
        sample, itemsize = call.sample, call.x.element_size()
        vec = call.channel_vec
        members = self.count_members(sample, itemsize)
        parts = cdiv(sample.hw, self.count_range_positions(itemsize))
        resident = count_multiprocessors(call.x.device) * self.programs_per_sm
        rows = call.n * sample.groups
        # The device refuses the launch if a team is not resident.
        teams = max(1, min(rows, resident // members))
        depth = next_power_of_2(2 * cdiv(self.lag, self.fragments))
        partial = call.allocate_partials_if_wanted(parts)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *partial,
            get_exchange_buffer(call.x.device, depth * teams * members),
            rows, members, parts, sample.hw // vec, sample.groups, sample.group_channels, call.affine.sample_stride,
            *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            "VEC": vec,
            "CHANNELS": self.channels,
            "LANES": 32 * self.num_warps,
            "GROUP": 16 // itemsize,
            "CHUNKS": self.chunks,
            "FRAGMENTS": self.fragments,
            "EVEN": sample.hw % self.count_range_positions(itemsize) == 0
            and sample.group_channels % self.channels == 0,
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
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
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
    """Write dx of `rows` groups, and partial sums for the parameter gradients.  `members` programs share each
    group.

    Each member has one part of the group: one of `parts` ranges of positions of CHANNELS channels.  A part
    is FRAGMENTS fragments of CHUNKS tiles along each channel.  A program reads every fragment twice: first
    for the group's sums, then LAG fragments later, out of L1 or L2, for dx.  It posts its sums after the
    last fragment of its part; LAG leaves the other members time to post theirs.  It writes sums over
    channels to [N, parts, C].  Programs are persistent; the launch must be cooperative.
    """
    allow_next_launch(EARLY)
    UNITS: tl.constexpr = LANES // CHANNELS
    STEP: tl.constexpr = UNITS * GROUP
    RUN: tl.constexpr = CHUNKS * STEP
    BEHIND: tl.constexpr = FRAGMENTS - 1 + LAG
    hw = channel_units * VEC
    group_size = channels * hw.to(tl.int64)
    c = groups * channels
    inverse_size = 1.0 / group_size.to(tl.float32)
    team = tl.program_id(0) // members
    teams = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    part = member % parts
    first_channel = (member // parts) * CHANNELS
    first = part * (FRAGMENTS * RUN)
    if CHANNELS == 1:
        lane_channel = 0
    else:
        lane_channel = tl.arange(0, LANES)[:, None] // UNITS
    channel = first_channel + lane_channel
    channel_mask = channel < channels
    position = compute_run_positions(LANES, UNITS, GROUP)
    at = lane_channel * hw + position
    inside = first_channel * hw.to(tl.int64) + first
    other = tl.arange(0, SLOTS)
    present = other < members

    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(rows, teams).to(tl.uint32) - 1
    turns = tl.cdiv(rows - team, teams)
    steps = turns * FRAGMENTS
    sum_dz = tl.zeros((LANES, 1), tl.float32)
    sum_dz_centred = tl.zeros((LANES, 1), tl.float32)
    constant = tl.full((), 0.0, tl.float32)
    factor = tl.full((), 0.0, tl.float32)

    for step in range(0, steps + BEHIND):
        wanted = step < steps
        turn = step // FRAGMENTS
        fragment = step % FRAGMENTS
        row = team + turn * teams
        start_at = row * group_size + inside + fragment * RUN
        left = hw - first - fragment * RUN
        tiles = load_backward_tiles(
            dy_ptr, x_ptr, residual_ptr, start_at, at, STEP, position, left, channel_mask, wanted,
            EVEN, STEP, CHUNKS, "evict_last",
        )  # fmt: skip
        mean = tl.load(mean_ptr + row, mask=wanted, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=wanted, other=0.0)
        sample = row // groups
        group_channel = (row - sample * groups) * channels + channel
        slope, offset = load_scaled_slope_and_offset(
            parameters, group_channel, sample * scale_stride + group_channel, channel_mask & wanted, GAIN
        )
        if AHEAD > 0 and step + AHEAD < steps:
            turn_ahead = (step + AHEAD) // FRAGMENTS
            run_ahead = ((step + AHEAD) % FRAGMENTS) * RUN
            at_ahead = (team + turn_ahead * teams) * group_size + inside + run_ahead
            left_ahead = hw - first - run_ahead
            channels_left = channels - first_channel
            prefetch_channel_runs(x_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)
            prefetch_channel_runs(dy_ptr + at_ahead, hw, channels_left, left_ahead, RUN, CHANNELS)

        if step >= BEHIND:
            late_turn = (step - BEHIND) // FRAGMENTS
            late_fragment = (step - BEHIND) % FRAGMENTS
            late_row = team + late_turn * teams
            late_at = late_row * group_size + inside + late_fragment * RUN
            late_left = hw - first - late_fragment * RUN
            tile = load_backward_tiles(
                dy_ptr, x_ptr, residual_ptr, late_at, at, STEP, position, late_left, channel_mask, True,
                EVEN, STEP, 1, "evict_first",
            )  # fmt: skip
            late_mean = tl.load(mean_ptr + late_row)
            late_rstd = tl.load(rstd_ptr + late_row)
            late_sample = late_row // groups
            late_channel = (late_row - late_sample * groups) * channels + channel
            late_slope, late_offset = load_scaled_slope_and_offset(
                parameters, late_channel, late_sample * scale_stride + late_channel, channel_mask, GAIN
            )
            if late_fragment == 0:
                tag = start + late_turn.to(tl.uint32)
                slots = locate_slot(exchange_ptr, team, tag, tl.where(present, other, 0), members, DEPTH)
                part_1, part_2, _ = collect_slots(slots, tag)
                sum_g, sum_g_xhat = sum_pair_to_scalars(
                    tl.where(present, part_1, 0.0), tl.where(present, part_2, 0.0)
                )
                constant = sum_g * inverse_size
                factor = sum_g_xhat * inverse_size
            scale = late_slope * late_rstd
            late_constant = constant * late_rstd
            late_factor = factor * late_rstd * late_rstd
            late_position = (late_row - late_sample * groups) * group_size + inside + late_fragment * RUN
            for i in tl.static_range(CHUNKS):
                this = tile
                if i + 1 < CHUNKS:
                    tile = load_backward_tiles(
                        dy_ptr, x_ptr, residual_ptr, late_at + (i + 1) * STEP, at, STEP, position,
                        late_left - (i + 1) * STEP, channel_mask, True, EVEN, STEP, 1, "evict_first",
                    )  # fmt: skip
                centred, dz = compute_tile_centred_and_dz(
                    this, 0, position, late_left - i * STEP, channel_mask,
                    late_mean, scale, late_offset, late_sample.to(tl.int64),
                    late_position + i * STEP + at, seed, dropout_threshold, dropout_scale, negative_slope,
                    True, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                here = late_left - i * STEP
                outside = load_tiles(
                    dresidual_out_ptr, late_at + i * STEP, at, STEP, position, here, channel_mask, True,
                    EVEN, STEP, 1, "evict_first",
                )  # fmt: skip
                store_tile_gradient(
                    centred, dz, dx_ptr, outside, late_at + i * STEP + at,
                    make_tile_mask(position, here, channel_mask, True, EVEN),
                    scale, late_constant, late_factor, "evict_first",
                )  # fmt: skip

        if wanted:
            sum_dz = tl.where(fragment > 0, sum_dz, 0.0)
            sum_dz_centred = tl.where(fragment > 0, sum_dz_centred, 0.0)
            sample_position = (row - sample * groups) * group_size + inside + fragment * RUN
            for i in tl.static_range(CHUNKS):
                centred, dz = compute_tile_centred_and_dz(
                    tiles, i, position + i * STEP, left, channel_mask,
                    mean, slope * rstd, offset, sample.to(tl.int64), sample_position + at + i * STEP,
                    seed, dropout_threshold, dropout_scale, negative_slope,
                    EVEN, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                sum_dz += tl.sum(dz, 1, keep_dims=True)
                sum_dz_centred += tl.sum(multiply_for_uniform_sum(dz, centred), 1, keep_dims=True)
            if fragment == FRAGMENTS - 1:
                if CHANNELS == 1:
                    run_dz, run_dz_xhat = sum_pair_to_scalars(
                        tl.reshape(sum_dz, (LANES,)), tl.reshape(sum_dz_centred, (LANES,))
                    )
                    run_dz_xhat *= rstd
                    g = run_dz * slope
                    g_xhat = run_dz_xhat * slope
                else:
                    lane_g = multiply_rounded(sum_dz, slope)
                    lane_g_xhat = multiply_rounded(sum_dz_centred, slope * rstd)
                    g, g_xhat = sum_pair_to_scalars(tl.reshape(lane_g, (LANES,)), tl.reshape(lane_g_xhat, (LANES,)))
                tag = start + turn.to(tl.uint32)
                post_scalars(locate_slot(exchange_ptr, team, tag, member, members, DEPTH), tag, g, g_xhat, 0.0)
                if dz_part_ptr is not None:
                    slot = (sample * parts + part).to(tl.int64) * c + (row - sample * groups) * channels
                    slot += first_channel
                    if CHANNELS == 1:
                        tl.store(dz_part_ptr + slot, run_dz * (1.0 / GAIN))
                        tl.store(dz_xhat_part_ptr + slot, run_dz_xhat * (1.0 / GAIN))
                    else:
                        store_channel_sums(
                            dz_part_ptr, dz_xhat_part_ptr, slot, sum_dz, sum_dz_centred, rstd,
                            channels - first_channel, CHANNELS, UNITS, GAIN,
                        )  # fmt: skip

    end_exchange(exchange_ptr, last_tag)
