"""Forward pass of contiguous groups that several programs share."""

from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import next_power_of_2
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.prefetch import prefetch
from fusednorm.jit.program_exchange import collect_slots, end_exchange, load_first_tag, locate_slot, post_scalars
from fusednorm.jit.register_fragments import merge_equal_sets, merge_sets, reduce_lane_moments
from fusednorm.launch.launches import Launch, count_full_range_chunks, make_cooperative_options
from fusednorm.launch.workspaces import get_exchange_buffer
from fusednorm.ops.group_norm.call import GroupNormForwardCall, GroupNormForwardConfig, fit_resident_programs
from fusednorm.ops.group_norm.contiguous.group_fragments import (
    compute_group_lane_moments,
    count_group_elements,
    load_chunk_affine,
    load_group_fragment,
    locate_frame,
    round_up_to_vectors,
    store_normalised_group_fragment,
    unify_mean_across_threads,
)
from fusednorm.ops.group_norm.sample_shape import SampleShape


@dataclass(frozen=True, slots=True)
class GroupNormForwardCooperative(GroupNormForwardConfig):
    """A configuration in which several resident programs share one contiguous group and exchange its moments.

    Each program has a range of `chunks` chunks, with 8 elements per thread in a chunk.  `programs_per_sm`
    programs are resident on a multiprocessor.  A program reads a range again `lag` groups after it posted
    the range's moments; with lag 0 the range stays in registers.  It prefetches the range `ahead` groups
    later into L2.
    """

    chunks: int
    num_warps: int
    programs_per_sm: int
    lag: int
    ahead: int

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return 256 * self.num_warps

    def count_members(self, sample: SampleShape) -> int:
        """Return the number of programs that share a group."""
        return -(-sample.aligned_group_length // (self.chunks * self.chunk_elements))

    def can_be_resident(self, sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool) -> bool:
        return can_wait and self.count_members(sample) <= multiprocessors * self.programs_per_sm

    def reduce_residency(self, call: GroupNormForwardCall) -> Self | None:
        """Reduce the number of resident programs until each thread's registers suffice for the call's x and
        residual.  Return the changed copy.

        The result is None if they never suffice, or if the programs that share a group would not be
        resident together.
        """
        ranges = 1 if self.lag == 0 else 2
        # A vector in two channels needs the parameters of both.
        extra = 48 if call.sample.hw * call.x.element_size() % 16 else 0
        return fit_resident_programs(
            self, call, ranges * self.chunks * 8 * call.held_bytes, extra, self.count_members(call.sample)
        )

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one cooperative launch, with at most as many programs as are resident together."""
        rows, sample = call.n * call.sample.groups, call.sample
        range_length = self.chunks * self.chunk_elements
        members = self.count_members(sample)
        slots = next_power_of_2(members)
        depth = next_power_of_2(max(2, 2 * self.lag))
        programs = min(rows, count_multiprocessors(call.x.device) * self.programs_per_sm // members) * members
        arguments = (
            *call.tensors, *call.statistics, get_exchange_buffer(call.x.device, depth * programs), rows, members,
            call.group_vectors, *call.fragment_indexing, call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            **call.make_chunk_options(self.chunk_elements, self.chunks, self.num_warps),
            "FULL": count_full_range_chunks(
                sample.group_length, self.chunk_elements, self.chunks, call.has_one_lane_per_thread
            ),
            "LANE_A_THREAD": call.has_one_lane_per_thread,
            "EQUAL": sample.group_length == range_length * slots and slots <= 32 * self.num_warps,
            "SKEWED": call.is_skewed,
            "SLOTS": slots,
            "DEPTH": depth,
            "LAG": self.lag,
            "AHEAD": self.ahead if call.can_prefetch_groups else 0,
            "PARAMETERS": call.find_parameter_unit(self.chunk_elements, range_length),
            **make_cooperative_options(self),
            **call.options.constexprs,
        }
        return [Launch(group_norm_nchw_forward_cooperative_kernel, (programs,), arguments, options)]


@triton.jit
def _collect_group_moments(
    exchange_ptr, team, tag, members, member, before, length, eps,
    RANGE_LENGTH: tl.constexpr, DEPTH: tl.constexpr, EQUAL: tl.constexpr,
    PARAMETERS: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """Wait for the moments of all programs that share a group.  Merge them into the group's mean, in two parts
    (mean + rest), and its rstd.

    The results are scalars.  `member` [slots] is the index of each program (member); each has one range of
    the group's frame, which starts `before` elements before the group.
    """
    count = count_group_elements(member * RANGE_LENGTH, before, before + length, RANGE_LENGTH, SKEWED).to(
        tl.float32
    )
    present = member < members
    slot_ptrs = locate_slot(exchange_ptr, team, tag, tl.where(present, member, 0), members, DEPTH)
    means, rests, squares = collect_slots(slot_ptrs, tag)
    if EQUAL:
        _, mean, rest, square = tl.reduce((count, means, rests, squares), 0, merge_equal_sets)
    else:
        _, mean, rest, square = tl.reduce((count, means, rests, tl.where(present, squares, 0.0)), 0, merge_sets)
    mean, rest = unify_mean_across_threads(mean, rest, means, member, PARAMETERS)
    return mean, rest, approximate_rsqrt(square / length.to(tl.float32) + eps)


@triton.jit
def _compute_range_moments(
    chunks, residuals, before, end,
    FULL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SKEWED: tl.constexpr,
    LANE_A_THREAD: tl.constexpr,
):  # fmt: skip
    """Compute the moments of a program's range of a group, as scalars.  They are the mean, in two parts
    (mean + rest), and the sum of squared deviations.

    `chunks` and `residuals` are the loaded range.  A full range needs no masks, even if other ranges do.
    """
    CHUNKS: tl.constexpr = len(chunks)
    if FULL == CHUNKS or (LANE_A_THREAD and ((before <= 0) & (end == CHUNKS * BLOCK))):
        count, means, rests, squares = compute_group_lane_moments(chunks, residuals, 0, end, CHUNKS, BLOCK, GROUP)
        moments = reduce_lane_moments(count, means, rests, squares, True)
    else:
        count, means, rests, squares = compute_group_lane_moments(
            chunks, residuals, before, end, FULL, BLOCK, GROUP, SKEWED=SKEWED
        )
        moments = reduce_lane_moments(count, means, rests, squares, False)
    return moments


@triton.jit
def _store_normalised_range(
    chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, base, row, first, before, end, group_length,
    indexing, mean, rest, rstd, epilogue,
    FULL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SKEWED: tl.constexpr, PARAMETERS: tl.constexpr,
    EVICT: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Normalise a program's loaded range of a group, and store y and h = x + residual.

    `store_normalised_group_fragment` does the work.  A full range needs no masks, even if other ranges do.
    """
    CHUNKS: tl.constexpr = len(chunks)
    if FULL == CHUNKS or (before <= 0) & (end == CHUNKS * BLOCK):
        store_normalised_group_fragment(
            chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, base, row, first, 0, end, group_length,
            indexing, mean, rest, rstd, epilogue, 0, 1,
            CHUNKS, BLOCK, GROUP, PARAMETERS, False, EVICT, ACTIVATION, DROPOUT,
        )  # fmt: skip
    else:
        store_normalised_group_fragment(
            chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, base, row, first, before, end,
            group_length, indexing, mean, rest, rstd, epilogue, 0, 1,
            FULL, BLOCK, GROUP, PARAMETERS, False, EVICT, ACTIVATION, DROPOUT, SKEWED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "rows", "members", "group_units", "groups", "channels", "channel_length", "magic", "division_shift",
        "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_forward_cooperative_kernel(
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
    rows: tl.int64,
    members: tl.int32,
    group_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int32,
    magic: tl.int64,
    division_shift: tl.int32,
    scale_stride: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    negative_slope: tl.float32,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    SKEWED: tl.constexpr,
    LANE_A_THREAD: tl.constexpr,
    EQUAL: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    PARAMETERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y.  `members` programs share each group, and each of them has a range of CHUNKS * BLOCK elements.

    A program reads a range twice: first for its moments, which it posts, then LAG groups later, out of L1
    or L2, for y.  LAG leaves the other members time to post theirs.  With LAG 0 the range instead stays in
    registers while the program waits for the others.  It prefetches the range AHEAD groups later into L2.
    Programs are persistent; the launch must be cooperative.
    """
    length = group_units * VEC
    range_length: tl.constexpr = CHUNKS * BLOCK
    team = tl.program_id(0) // members
    teams = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    first = member * range_length
    start = load_first_tag(exchange_ptr)
    last_tag = start + tl.cdiv(rows, teams).to(tl.uint32) - 1
    turns = tl.cdiv(rows - team, teams)
    other = tl.arange(0, SLOTS)
    indexing = (groups, channels, channel_length, magic, division_shift, scale_stride)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    epilogue = (seed, dropout_threshold, dropout_scale, negative_slope)

    tag = start
    for turn in range(0, turns + LAG):
        # The group whose moments are computed; after the last iteration, the last group again, without use.
        row = team + tl.minimum(turn, turns - 1) * teams
        frame, before = locate_frame(row, length, GROUP, SKEWED)
        x_at = frame + first
        end = tl.minimum(before + length - first, range_length)
        chunks = load_group_fragment(
            x_ptr, x_at, end, FULL, BLOCK, CHUNKS, GROUP, "evict_last" if LAG else "", SKEWED
        )
        residuals = load_group_fragment(
            residual_ptr, x_at, end, FULL, BLOCK, CHUNKS, GROUP, "evict_last" if LAG else "", SKEWED
        )
        if AHEAD > 0 and turn + AHEAD < turns:
            if SKEWED:
                next_frame, next_before = locate_frame(row + AHEAD * teams, length, GROUP, SKEWED)
                next_end = tl.minimum(next_before + length - first, range_length)
                if next_end > 0:
                    prefetch(x_ptr + next_frame + first, round_up_to_vectors(next_end, GROUP))
            else:
                prefetch(x_ptr + x_at + AHEAD * teams * length.to(tl.int64), end)

        if LAG > 0 and turn >= LAG:
            late_row = team + (turn - LAG) * teams
            late_frame, late_before = locate_frame(late_row, length, GROUP, SKEWED)
            late_at = late_frame + first
            late_first = first - late_before
            late_end = tl.minimum(late_before + length - first, range_length)
            affine = load_chunk_affine(parameters, late_row, late_first, indexing, 0, BLOCK, GROUP, PARAMETERS)
            late = load_group_fragment(x_ptr, late_at, late_end, FULL, BLOCK, CHUNKS, GROUP, "evict_first", SKEWED)
            late_residuals = load_group_fragment(
                residual_ptr, late_at, late_end, FULL, BLOCK, CHUNKS, GROUP, "evict_first", SKEWED
            )
            mean, rest, rstd = _collect_group_moments(
                exchange_ptr, team, tag - LAG, members, other, late_before,
                length, eps, range_length, DEPTH, EQUAL, PARAMETERS, SKEWED,
            )  # fmt: skip
            if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
                if member == 0:
                    tl.store(mean_ptr + late_row, mean + rest)
                    tl.store(rstd_ptr + late_row, rstd)
            _store_normalised_range(
                late, late_residuals, affine, parameters, y_ptr, residual_out_ptr, late_at, late_row, late_first,
                late_before - first, late_end, length, indexing, mean, rest, rstd, epilogue,
                FULL, BLOCK, GROUP, SKEWED, PARAMETERS, "evict_first", ACTIVATION, DROPOUT,
            )  # fmt: skip

        if turn < turns:
            range_mean, range_rest, range_square = _compute_range_moments(
                chunks, residuals, before - first, end, FULL, BLOCK, GROUP, SKEWED, LANE_A_THREAD
            )
            post_scalars(
                locate_slot(exchange_ptr, team, tag, member, members, DEPTH),
                tag,
                range_mean,
                range_rest,
                range_square,
            )
            if LAG == 0:
                affine = load_chunk_affine(parameters, row, first - before, indexing, 0, BLOCK, GROUP, PARAMETERS)
                mean, rest, rstd = _collect_group_moments(
                    exchange_ptr, team, tag, members, other, before,
                    length, eps, range_length, DEPTH, EQUAL, PARAMETERS, SKEWED,
                )  # fmt: skip
                if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
                    if member == 0:
                        tl.store(mean_ptr + row, mean + rest)
                        tl.store(rstd_ptr + row, rstd)
                _store_normalised_range(
                    chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, x_at, row, first - before,
                    before - first, end, length, indexing, mean, rest, rstd, epilogue,
                    FULL, BLOCK, GROUP, SKEWED, PARAMETERS, "", ACTIVATION, DROPOUT,
                )  # fmt: skip
        tag += 1

    end_exchange(exchange_ptr, last_tag)
