"""Forward pass of channels-last samples whose column blocks several programs share."""

from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.prefetch import prefetch_row_lines
from fusednorm.jit.program_exchange import collect_tile, end_exchange, load_first_tag, locate_slot, post_tile
from fusednorm.launch.launches import Launch, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig, fit_resident_programs
from fusednorm.ops.group_norm.channels_last.block_fragments import (
    compute_group_moments,
    compute_lane_columns,
    compute_lane_rows,
    expand_groups_to_columns,
    load_block_rows,
    load_columns_as_tuple,
    make_block_options,
    make_block_tile,
    merge_member_moments,
    store_group_statistics,
    store_normalised_rows,
)
from fusednorm.ops.group_norm.sample_shape import SampleShape


@dataclass(frozen=True, slots=True)
class ForwardCooperativeBlock(GroupNormForwardConfig):
    """A configuration in which several resident programs share a block of `block_groups` groups of a sample.

    Each program has `chunks` chunks of positions, with 16 bytes per thread in a chunk.  The other fields are
    those of `GroupNormForwardCooperative`.
    """

    block_groups: int
    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    def count_members(self, sample: SampleShape, itemsize: int) -> int:
        """Return the number of programs that share a block."""
        rows = make_block_tile(sample, self.block_groups, self.num_warps, itemsize).positions
        return -(-sample.hw // (self.chunks * rows))

    def can_be_resident(self, sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool) -> bool:
        return can_wait and self.count_members(sample, itemsize) <= multiprocessors * self.programs_per_sm

    def reduce_residency(self, call: GroupNormForwardCall) -> Self | None:
        """Reduce the number of resident programs until each thread's registers suffice for the call's x and
        residual.  Return the changed copy.

        The result is None if they never suffice, or if the programs that share a block would not be
        resident together.
        """
        sample, size = call.sample, call.x.element_size()
        tile = make_block_tile(sample, self.block_groups, self.num_warps, size)
        ranges = 1 if self.lag == 0 else 2
        held = ranges * self.chunks * tile.vec * call.held_bytes
        return fit_resident_programs(self, call, held, members=self.count_members(sample, size))

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one cooperative launch, with at most as many programs as are resident together."""
        sample = call.sample
        blocks = cdiv(sample.groups, self.block_groups)
        units = call.n * blocks
        tile = make_block_tile(sample, self.block_groups, self.num_warps, call.x.element_size())
        members = self.count_members(sample, call.x.element_size())
        depth = next_power_of_2(max(2, 2 * self.lag))
        programs = min(units, count_multiprocessors(call.x.device) * self.programs_per_sm // members) * members
        options = {
            **make_block_options(sample, self.block_groups, self.num_warps, tile),
            "CHUNKS": self.chunks,
            "FULL": self.chunks if sample.hw % (self.chunks * tile.positions) == 0 else 0,
            "SLOTS": next_power_of_2(members),
            "DEPTH": depth,
            "LAG": self.lag,
            "AHEAD": self.ahead,
            **make_cooperative_options(self),
            **call.options.constexprs,
        }
        # A slot for each group of a block.
        buffer = get_exchange_buffer(call.x.device, depth * programs * next_power_of_2(self.block_groups))
        arguments = (
            *call.tensors, *call.statistics, buffer, units, members, sample.hw, sample.c // tile.vec,
            sample.groups, sample.group_channels, blocks, self.block_groups, call.options.eps,
            call.affine.sample_stride, *call.options.epilogue_arguments,
        )  # fmt: skip
        return [Launch(group_norm_nhwc_forward_cooperative_kernel, (programs,), arguments, options)]


@triton.jit(
    do_not_specialize=[
        "units", "members", "hw", "column_units", "groups", "channels", "blocks", "block_groups",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_forward_cooperative_kernel(
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
    exchange_ptr,
    units: tl.int32,
    members: tl.int32,
    hw: tl.int64,
    column_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    blocks: tl.int32,
    block_groups: tl.int32,
    eps: tl.float32,
    scale_stride: tl.int64,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    CV: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    EVEN: tl.constexpr,
    SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y.  `members` programs share each block of columns of a sample.

    A member has a fragment of the block, CHUNKS * ROWS positions.  A program reads a fragment twice: first
    for its groups' moments, which it posts, then LAG blocks later, out of L1 or L2, for y.  LAG leaves the
    other members time to post theirs.  With LAG 0 the fragment instead stays in registers while the program
    waits.  It prefetches the fragment AHEAD blocks later into L2.  Programs are persistent; the launch must
    be cooperative.
    """
    fragment_rows: tl.constexpr = CHUNKS * ROWS
    width: tl.constexpr = VEC // SUMS
    team = tl.program_id(0) // members
    teams = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    c = column_units * VEC
    block_units = block_groups * channels // VEC
    stride = c.to(tl.int64)
    first_row = member.to(tl.int64) * fragment_rows
    rows = tl.minimum(hw - first_row, fragment_rows).to(tl.int32)
    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(units, teams).to(tl.uint32) - 1
    turns = tl.cdiv(units - team, teams)
    group = tl.arange(0, GROUPS)
    membership = (tl.arange(0, CV * SUMS) * width // channels)[:, None] == group[None, :]
    length = hw.to(tl.float32) * channels
    other = tl.arange(0, SLOTS)[:, None]
    rows_of_other = tl.minimum(tl.maximum(hw - other.to(tl.int64) * fragment_rows, 0), fragment_rows)
    count_of_other = rows_of_other.to(tl.float32) * channels
    epilogue = (seed, dropout_threshold, dropout_scale, negative_slope)
    row = compute_lane_rows(ROWS, CV).to(tl.int64) * stride

    tag = start
    for turn in range(0, turns + LAG):
        # The block whose moments are computed; after the last iteration, the last block again, without use.
        unit = team + tl.minimum(turn, turns - 1) * teams
        sample = (unit // blocks).to(tl.int64)
        block = unit % blocks
        column, column_mask = compute_lane_columns(block, block_units, column_units, ROWS, CV, VEC, EVEN)
        base = (sample * hw + first_row) * stride
        chunks = load_block_rows(
            x_ptr, base, row + column, stride, rows, column_mask, FULL, ROWS, CHUNKS, "evict_last" if LAG else ""
        )
        residuals = load_block_rows(
            residual_ptr, base, row + column, stride, rows, column_mask, FULL, ROWS, CHUNKS,
            "evict_last" if LAG else "",
        )  # fmt: skip
        if AHEAD > 0 and turn + AHEAD < turns:
            next_unit = unit + AHEAD * teams
            next_base = ((next_unit // blocks).to(tl.int64) * hw + first_row) * stride
            next_column = (next_unit % blocks) * block_units * VEC
            prefetch_row_lines(
                x_ptr + next_base + next_column, rows, c, tl.minimum(block_units * VEC, c - next_column)
            )

        if LAG == 0:
            late = chunks
            late_residuals = residuals
            late_sample = sample
            late_block = block
            late_column = column
            late_mask = column_mask
            late_base = base
        else:
            late_unit = team + tl.maximum(turn - LAG, 0) * teams
            late_sample = (late_unit // blocks).to(tl.int64)
            late_block = late_unit % blocks
            late_column, late_mask = compute_lane_columns(
                late_block, block_units, column_units, ROWS, CV, VEC, EVEN
            )
            late_base = (late_sample * hw + first_row) * stride

        if LAG == 0 or turn >= LAG:
            affine = (
                load_columns_as_tuple(weight_ptr, late_column, late_mask),
                load_columns_as_tuple(bias_ptr, late_column, late_mask),
                load_columns_as_tuple(scale_ptr, late_sample * scale_stride + late_column, late_mask),
                load_columns_as_tuple(shift_ptr, late_sample * scale_stride + late_column, late_mask),
            )
            if LAG > 0:
                late = load_block_rows(
                    x_ptr, late_base, row + late_column, stride, rows, late_mask, FULL, ROWS, CHUNKS, "evict_first"
                )
                late_residuals = load_block_rows(
                    residual_ptr, late_base, row + late_column, stride, rows, late_mask, FULL, ROWS, CHUNKS,
                    "evict_first",
                )  # fmt: skip
            else:
                _post_moments(
                    exchange_ptr, chunks, residuals, tag, team, member, members, rows,
                    channels, membership, group, FULL, ROWS, SUMS, GROUPS, DEPTH,
                )  # fmt: skip
            late_tag = tag - LAG
            slots = locate_slot(
                exchange_ptr, team, late_tag, tl.where(other < members, other, 0) * GROUPS + group[None, :],
                members * GROUPS, DEPTH,
            )  # fmt: skip
            means, rests, squares = collect_tile(slots, late_tag)
            mean, rest, square = merge_member_moments(means, rests, squares, count_of_other, length)
            rstd = approximate_rsqrt(square / length + eps)
            first_group = late_block * block_groups
            group_mask = (group < tl.minimum(block_groups, groups - first_group)) & (member == 0)
            store_group_statistics(
                mean_ptr, rstd_ptr, mean, rest, rstd, late_sample * groups + first_group + group, group_mask
            )
            store_normalised_rows(
                late, late_residuals, affine, y_ptr, residual_out_ptr, late_base, row + late_column, stride, rows,
                late_mask, expand_groups_to_columns(mean, membership, ROWS, SUMS, VEC),
                expand_groups_to_columns(rest, membership, ROWS, SUMS, VEC),
                expand_groups_to_columns(rstd, membership, ROWS, SUMS, VEC),
                late_sample, first_row * stride, epilogue, 0, 1,
                FULL, ROWS, False, "evict_first" if LAG else "", ACTIVATION, DROPOUT,
            )  # fmt: skip

        if LAG > 0 and turn < turns:
            _post_moments(
                exchange_ptr, chunks, residuals, tag, team, member, members, rows,
                channels, membership, group, FULL, ROWS, SUMS, GROUPS, DEPTH,
            )  # fmt: skip
        tag += 1

    end_exchange(exchange_ptr, last_tag)


@triton.jit
def _post_moments(
    exchange_ptr, chunks, residuals, tag, team, member, members, rows, channels, membership, group,
    FULL: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute the moments of a program's fragment and post them for the other programs that share its block.

    There is one slot for each group of the block.
    """
    mean, rest, square = compute_group_moments(chunks, residuals, rows, channels, membership, FULL, ROWS, SUMS)
    slots = locate_slot(exchange_ptr, team, tag, member * GROUPS + group, members * GROUPS, DEPTH)
    post_tile(slots, group < GROUPS, tag, mean, rest, square)
