"""Backward pass of channels-last samples whose groups several programs share.

Programs share bundles of blocks of columns.  The formulas are in `contiguous.backward.tile`; z's slope and offset,
and GAIN, in `gradient_tiles`.
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.early_start import allow_next_launch
from fusednorm.jit.loads import widen
from fusednorm.jit.program_exchange import PAIR_WORDS, collect_pairs, end_exchange, load_first_tag, post_pairs
from fusednorm.jit.reductions import multiply_rounded, sum_pair
from fusednorm.launch.launches import Launch, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormBackwardConfig
from fusednorm.ops.group_norm.channels_last.column_blocks import (
    count_max_overlaps,
    load_group_statistic,
    make_vector_mask,
    prefetch_addresses,
    select_for_columns,
)
from fusednorm.ops.group_norm.channels_last.group_sum_exchange import (
    collect_and_post_totals,
    collect_and_sum_partials,
    locate_group_total,
)
from fusednorm.ops.group_norm.gradient_reductions import plan_parameter_reductions
from fusednorm.ops.group_norm.gradient_tiles import (
    compute_tile_centred_and_dz,
    load_backward_tiles,
    load_scaled_slope_and_offset,
    load_tiles,
    make_tile_mask,
)
from fusednorm.ops.group_norm.sample_shape import MAX_OFFSET, SampleShape, can_stay_in_l2


@triton.jit(
    do_not_specialize=[
        "units", "members", "splits", "hw", "column_units", "groups", "channels", "bundles", "bundle_groups",
        "bundle_units", "bundle_blocks", "block_units", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_backward_cooperative_kernel(
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
    units: tl.int32,
    members: tl.int32,
    splits: tl.int32,
    hw: tl.int32,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    bundles: tl.int32,
    bundle_groups: tl.int32,
    bundle_units: tl.int32,
    bundle_blocks: tl.int32,
    block_units: tl.int32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    CV: tl.constexpr,
    CHUNKS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    EVEN: tl.constexpr,
    LABELS: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
    DIRECT: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute dx of channels-last groups, and partial sums for the parameter gradients.  Several programs
    share each group and exchange its sums.

    The groups of a sample are processed in bundles: `bundle_groups` groups, which occupy `bundle_blocks`
    blocks of columns.  A unit is one sample's bundle.

    `members` programs share a unit; each has a block of `block_units` vectors over a range of FRAGMENTS *
    CHUNKS * ROWS positions, in tiles of ROWS positions.  A vector has GROUP columns and touches at most
    LABELS groups; a block touches at most SPAN groups, a group at most OVERLAP blocks.  If DIRECT, a block
    is a group.  A program reads every fragment twice: first for sums, then LAG fragments later, out of L1
    or L2, for dx.  It posts its sums after the range's last fragment.  It writes sums over channels to
    [N, splits, C].  Programs are persistent; the launch must be cooperative.
    """
    allow_next_launch(EARLY)
    BEHIND: tl.constexpr = FRAGMENTS - 1 + LAG
    ROWS: tl.constexpr = LANES // CV
    RUN: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = CV * GROUP
    c = column_units * GROUP
    block_columns = block_units * GROUP
    bundle_columns = bundle_units * GROUP
    inverse_size = 1.0 / (hw.to(tl.float32) * channels.to(tl.float32))
    team = tl.program_id(0) // members
    teams = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    if DIRECT:
        block, split, block_first, block_group = 0, member, 0, 0
    else:
        block = member % bundle_blocks
        split = member // bundle_blocks
        block_first = block * block_columns
        block_group = block_first // channels
    first = split * (FRAGMENTS * RUN)
    contributors = splits * OVERLAP

    lane = tl.arange(0, LANES)[:, None]
    inner = tl.arange(0, GROUP)[None, :]
    row = lane // CV
    vector = lane % CV
    vector_first = block_first + vector * GROUP
    vector_group = vector * 0 if DIRECT else vector_first // channels
    group_index = (vector_first + inner) // channels - vector_group
    at = row * c + (vector * GROUP + inner)
    step_size = ROWS * c
    inside = first * c.to(tl.int64) + block_first

    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(units, teams).to(tl.uint32) - 1
    turns = tl.cdiv(units - team, teams)
    steps = turns * FRAGMENTS
    sum_dz = tl.zeros((LANES, GROUP), tl.float32)
    sum_dz_centred = tl.zeros((LANES, GROUP), tl.float32)
    constants = ()
    factors = ()
    for i in tl.static_range(LABELS):  # noqa: B007
        constants = constants + (tl.zeros((LANES, 1), tl.float32),)
        factors = factors + (tl.zeros((LANES, 1), tl.float32),)

    for step in range(0, steps + BEHIND):
        wanted = step < steps
        turn = step // FRAGMENTS
        fragment = step % FRAGMENTS
        unit = team + turn * teams
        sample = unit // bundles
        bundle = unit - sample * bundles
        left = hw - first - fragment * RUN
        bundle_first = bundle * bundle_columns
        sample_size = hw.to(tl.int64) * c
        start_at = sample * sample_size + bundle_first + inside + fragment * RUN * c.to(tl.int64)
        columns = make_vector_mask(vector, block_units, bundle_first + vector_first, c, EVEN)
        tiles = load_backward_tiles(
            dy_ptr, x_ptr, residual_ptr, start_at, at, step_size, row, left, columns, wanted,
            EVEN, ROWS, CHUNKS, "evict_last",
        )  # fmt: skip
        if AHEAD > 0 and step + AHEAD < steps:
            ahead_turn = (step + AHEAD) // FRAGMENTS
            ahead_run = ((step + AHEAD) % FRAGMENTS) * RUN
            ahead_unit = team + ahead_turn * teams
            ahead_sample = ahead_unit // bundles
            ahead_first = (ahead_unit - ahead_sample * bundles) * bundle_columns
            ahead_at = ahead_sample * sample_size + ahead_first + inside + ahead_run * c.to(tl.int64)
            ahead_columns = make_vector_mask(vector, block_units, ahead_first + vector_first, c, EVEN)
            for i in tl.static_range(CHUNKS):
                there = make_tile_mask(row + i * ROWS, hw - first - ahead_run, ahead_columns, True, EVEN)
                prefetch_addresses(x_ptr + ahead_at + i * step_size + row * c + vector * GROUP, there)
                prefetch_addresses(dy_ptr + ahead_at + i * step_size + row * c + vector * GROUP, there)

        if not DIRECT:  # noqa: SIM102 (a constexpr and a run-time condition)
            if step >= FRAGMENTS and step % FRAGMENTS == 0 and step <= steps:
                lead_turn = step // FRAGMENTS - 1
                lead_bundle = (team + lead_turn * teams) % bundles
                lead_tag = start + lead_turn.to(tl.uint32)
                there_are = tl.minimum(bundle_groups, groups - lead_bundle * bundle_groups)
                collect_and_post_totals(
                    exchange_ptr, team, lead_tag, member, members, there_are, bundle_groups, channels,
                    block_columns, contributors, OVERLAP, SLOTS, DEPTH,
                )  # fmt: skip

        if step >= BEHIND:
            late_turn = (step - BEHIND) // FRAGMENTS
            late_run = ((step - BEHIND) % FRAGMENTS) * RUN
            late_unit = team + late_turn * teams
            late_sample = late_unit // bundles
            late_bundle = late_unit - late_sample * bundles
            late_first = late_bundle * bundle_columns
            late_at = late_sample * sample_size + late_first + inside + late_run * c.to(tl.int64)
            late_left = hw - first - late_run
            late_columns = make_vector_mask(vector, block_units, late_first + vector_first, c, EVEN)
            late_group = late_bundle * bundle_groups
            last_group = tl.minimum(bundle_groups, groups - late_group) - 1
            tile = load_backward_tiles(
                dy_ptr, x_ptr, residual_ptr, late_at, at, step_size, row, late_left, late_columns, True,
                EVEN, ROWS, 1, "evict_first",
            )  # fmt: skip
            statistics_at = late_sample * groups + late_group
            late_mean = load_group_statistic(mean_ptr, statistics_at, vector_group, last_group, group_index, LABELS)
            late_rstd = load_group_statistic(rstd_ptr, statistics_at, vector_group, last_group, group_index, LABELS)
            late_channel = late_first + vector_first + inner
            slope, offset = load_scaled_slope_and_offset(
                parameters, late_channel, late_sample * scale_stride + late_channel, late_columns, GAIN
            )
            # A program may wait only for totals that need its own part: a later total may have replaced any other.
            # So a lane collects only groups of the block, and a block without columns collects none.
            late_end = tl.minimum(tl.minimum(block_first + block_columns, bundle_columns), c - late_first)
            if (late_run == 0) & (block_first < late_end):
                late_tag = start + late_turn.to(tl.uint32)
                if DIRECT:
                    total_ptr = locate_group_total(exchange_ptr, team, late_tag, 0, 1, contributors, DEPTH)
                    g, g_xhat = collect_and_sum_partials(
                        total_ptr, late_tag, tl.arange(0, SLOTS) < contributors, SLOTS
                    )
                    constants = (tl.zeros((LANES, 1), tl.float32) + g * inverse_size,)
                    factors = (tl.zeros((LANES, 1), tl.float32) + g_xhat * inverse_size,)
                else:
                    lane_last = (tl.minimum(vector_first + GROUP, late_end) - 1) // channels
                    constants = ()
                    factors = ()
                    for i in tl.static_range(LABELS):
                        group = tl.minimum(vector_group + i, lane_last)
                        total_ptrs = locate_group_total(
                            exchange_ptr, team, late_tag, group, bundle_groups, contributors, DEPTH
                        )
                        sum_g, sum_g_xhat = collect_pairs(total_ptrs, late_tag)
                        constants = constants + (sum_g * inverse_size,)
                        factors = factors + (sum_g_xhat * inverse_size,)
            scale = slope * late_rstd
            late_constant = select_for_columns(constants, group_index) * late_rstd
            late_factor = select_for_columns(factors, group_index) * late_rstd * late_rstd
            for i in tl.static_range(CHUNKS):
                this = tile
                if i + 1 < CHUNKS:
                    tile = load_backward_tiles(
                        dy_ptr, x_ptr, residual_ptr, late_at + (i + 1) * step_size, at, step_size, row,
                        late_left - (i + 1) * ROWS, late_columns, True, EVEN, ROWS, 1, "evict_first",
                    )  # fmt: skip
                tile_at = late_at + i * step_size
                centred, dz = compute_tile_centred_and_dz(
                    this, 0, row, late_left, late_columns, late_mean, scale, offset, late_sample.to(tl.int64),
                    tile_at - late_sample * sample_size + at,
                    seed, dropout_threshold, dropout_scale, negative_slope,
                    True, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                # Not `store_tile_gradient`: the different order of loads would change the machine code.
                dx = dz * scale - (centred * late_factor + late_constant)
                outside = load_tiles(
                    dresidual_out_ptr, tile_at, at, step_size, row, late_left - i * ROWS, late_columns, True,
                    EVEN, ROWS, 1, "evict_first",
                )  # fmt: skip
                if len(outside) > 0:
                    dx += widen(outside[0])
                mask = make_tile_mask(row + i * ROWS, late_left, late_columns, True, EVEN)
                tl.store(
                    dx_ptr + tile_at + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first"
                )

        if wanted:
            first_group = bundle * bundle_groups
            last_group = tl.minimum(bundle_groups, groups - first_group) - 1
            statistics_at = sample * groups + first_group
            mean = load_group_statistic(mean_ptr, statistics_at, vector_group, last_group, group_index, LABELS)
            rstd = load_group_statistic(rstd_ptr, statistics_at, vector_group, last_group, group_index, LABELS)
            channel = bundle_first + vector_first + inner
            slope, offset = load_scaled_slope_and_offset(
                parameters, channel, sample * scale_stride + channel, columns, GAIN
            )
            scale = slope * rstd
            sum_dz = tl.where(fragment > 0, sum_dz, 0.0)
            sum_dz_centred = tl.where(fragment > 0, sum_dz_centred, 0.0)
            for i in tl.static_range(CHUNKS):
                centred, dz = compute_tile_centred_and_dz(
                    tiles, i, row + i * ROWS, left, columns, mean, scale, offset, sample.to(tl.int64),
                    start_at - sample * sample_size + i * step_size + at,
                    seed, dropout_threshold, dropout_scale, negative_slope,
                    EVEN, ACTIVATION, DROPOUT, GAIN,
                )  # fmt: skip
                sum_dz += dz
                sum_dz_centred += dz * centred
            if fragment == FRAGMENTS - 1:
                sum_dz_xhat = multiply_rounded(sum_dz_centred, rstd)
                channel_dz, channel_dz_xhat = sum_pair(
                    tl.reshape(sum_dz, (ROWS, WIDTH)), tl.reshape(sum_dz_xhat, (ROWS, WIDTH)), 0
                )
                block_column = tl.arange(0, WIDTH)[None, :]
                there = (block_column < block_columns) & (bundle_first + block_first + block_column < c)
                if dz_part_ptr is not None:
                    part_at = (sample * splits + split) * c.to(tl.int64) + bundle_first + block_first + block_column
                    tl.store(dz_part_ptr + part_at, channel_dz * (1.0 / GAIN), mask=there)
                    tl.store(dz_xhat_part_ptr + part_at, channel_dz_xhat * (1.0 / GAIN), mask=there)
                touched = tl.arange(0, SPAN)[:, None]
                mine = there
                if SPAN > 1:
                    mine = touched == (block_first + block_column) // channels - block_group
                block_channel = bundle_first + block_first + block_column
                block_slope, _block_offset = load_scaled_slope_and_offset(
                    parameters, block_channel, sample * scale_stride + block_channel, there, GAIN
                )
                g, g_xhat = sum_pair(
                    tl.where(mine, channel_dz * block_slope, 0.0), tl.where(mine, channel_dz_xhat * block_slope,
                    0.0), 1,
                )  # fmt: skip
                tag = start + turn.to(tl.uint32)
                group = block_group + touched
                end = tl.minimum(tl.minimum(block_first + block_columns, bundle_columns), c - bundle_first)
                part_ptrs = locate_group_total(exchange_ptr, team, tag, group, bundle_groups, contributors, DEPTH)
                contributor = split
                if not DIRECT:
                    contributor = split * OVERLAP + block - group * channels // block_columns
                post_pairs(part_ptrs + (1 + contributor) * PAIR_WORDS, group * channels < end, tag, g, g_xhat)

    end_exchange(exchange_ptr, last_tag)


@dataclass(frozen=True, slots=True)
class BackwardCooperativeBlock(GroupNormBackwardConfig):
    """A configuration in which several resident programs share channels-last groups and exchange partial sums
    of each group.

    Each program has a block of `columns` columns over a range of positions.  A range is `fragments`
    fragments, a fragment `chunks` tiles; a tile has one 16-byte vector of x per thread.  Blocks with parts
    of the same group form a bundle.  `programs_per_sm`, `lag` and `ahead` are those of
    `GroupNormBackwardCooperative`.
    """

    columns: int
    chunks: int
    fragments: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    def count_vectors(self, itemsize: int) -> int:
        """Return the number of adjacent threads along the columns; some threads may have no column."""
        return next_power_of_2(self.columns * itemsize // 16)

    def count_tile_rows(self, itemsize: int) -> int:
        """Return the number of positions of a tile."""
        return 32 * self.num_warps // self.count_vectors(itemsize)

    def count_range_rows(self, itemsize: int) -> int:
        """Return the number of positions of a range."""
        return self.fragments * self.chunks * self.count_tile_rows(itemsize)

    def count_splits(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of ranges of a block."""
        return -(-sample.hw // self.count_range_rows(itemsize))

    def count_bundle_blocks(self, sample: SampleShape) -> int:
        """Return the number of blocks of a bundle: the fewest that consist of complete groups."""
        blocks = sample.group_channels // gcd(self.columns, sample.group_channels)
        return min(blocks, -(-sample.c // self.columns))

    def count_members(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of programs that share a bundle of blocks."""
        return self.count_splits(sample, itemsize) * self.count_bundle_blocks(sample)

    def can_run(self, sample: SampleShape, itemsize: int, multiprocessors: int) -> bool:
        """Return whether this configuration can process samples of this shape on a device with
        `multiprocessors` multiprocessors.

        The programs that share a bundle of blocks must be resident together, L2 must keep a fragment until its
        second read, C must be a multiple of 16 bytes, and offsets must fit 32 bits.
        """
        programs = self.programs_per_sm * multiprocessors
        return (
            sample.c * itemsize % 16 == 0
            and self.count_members(sample, itemsize) <= programs
            and can_stay_in_l2(32 * self.num_warps, self.chunks * (self.fragments + self.lag), programs)
            and sample.hw < MAX_OFFSET
        )

    def compute_padded_width(self, sample: SampleShape, itemsize: int) -> int:
        """Compute the number of columns of the tiles of all blocks."""
        return -(-sample.c // self.columns) * self.count_vectors(itemsize) * (16 // itemsize)

    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the cooperative launch for dx and partial sums, and the launches for parameter gradients."""
        sample, itemsize = call.sample, call.x.element_size()
        group = 16 // itemsize
        splits, members = self.count_splits(sample, itemsize), self.count_members(sample, itemsize)
        blocks = self.count_bundle_blocks(sample)
        bundle_groups = min(blocks * self.columns, sample.c) // sample.group_channels
        bundles = cdiv(sample.groups, bundle_groups)
        units = call.n * bundles
        resident = count_multiprocessors(call.x.device) * self.programs_per_sm
        teams = max(1, min(units, resident // members))
        # If so, no other block has columns of its group.
        direct = self.columns == sample.group_channels
        depth = next_power_of_2((2 if direct else 1) * cdiv(self.lag, self.fragments))
        overlap = min(blocks, count_max_overlaps(self.columns, sample.group_channels))
        partial = call.allocate_partials_if_wanted(splits)
        pairs = teams * depth * bundle_groups * (splits * overlap + 1)
        arguments = (
            *call.inputs, call.dresidual_out, call.parameters, call.mean, call.rstd, call.out.dx, *partial,
            get_exchange_buffer(call.x.device, cdiv(pairs, 2)),
            units, members, splits, sample.hw, sample.c // group, sample.groups, sample.group_channels,
            bundles, bundle_groups, bundle_groups * sample.group_channels // group, blocks, self.columns // group,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        has_full_vectors = (
            self.columns // group == self.count_vectors(itemsize) and sample.c % (blocks * self.columns) == 0
        )
        options = {
            "GROUP": group,
            "CV": self.count_vectors(itemsize),
            "LANES": 32 * self.num_warps,
            "CHUNKS": self.chunks,
            "FRAGMENTS": self.fragments,
            "EVEN": has_full_vectors and sample.hw % self.count_range_rows(itemsize) == 0,
            "LABELS": count_max_overlaps(sample.group_channels, group),
            "SPAN": next_power_of_2(min(bundle_groups, count_max_overlaps(sample.group_channels, self.columns))),
            "OVERLAP": overlap,
            "DIRECT": direct,
            "SLOTS": next_power_of_2(splits * overlap),
            "DEPTH": depth,
            "LAG": self.lag,
            "AHEAD": self.ahead,
            "EARLY": call.can_start_early,
            "num_warps": self.num_warps,
            **make_cooperative_options(self),
            **call.gradient_options,
        }
        return [
            Launch(group_norm_nhwc_backward_cooperative_kernel, (teams * members,), arguments, options),
            *plan_parameter_reductions(partial, call.affine, call.out, splits, call.can_start_early),
        ]
