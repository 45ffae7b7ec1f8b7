"""Forward pass of contiguous groups that one program holds in registers, in the dtype of memory."""

from dataclasses import dataclass, replace
from typing import Self

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.jit.prefetch import FEW_PROGRAMS, prefetch, prefetch_lines
from fusednorm.jit.register_fragments import reduce_lane_moments
from fusednorm.launch.launches import Launch, compute_max_registers, count_full_chunks
from fusednorm.ops.group_norm.call import (
    GroupNormForwardCall,
    GroupNormForwardConfig,
    count_writers_per_group,
    fit_resident_programs,
)
from fusednorm.ops.group_norm.contiguous.group_fragments import (
    compute_group_lane_moments,
    load_chunk_affine,
    load_group_fragment,
    locate_frame,
    round_up_to_vectors,
    store_normalised_group_fragment,
    unify_mean_across_threads,
)


@dataclass(frozen=True, slots=True)
class GroupNormForwardResident(GroupNormForwardConfig):
    """A configuration in which each program holds one contiguous group in registers, in the dtype of memory.

    A chunk of the group is 8 elements per thread.  Registers are limited so that `programs_per_sm` programs
    are resident on a multiprocessor.  Launches with fewer programs than half the multiprocessors use up to
    `writers` programs per group.  A program prefetches the group (number of multiprocessors *
    `prefetch_distance_per_sm`) groups later into L2.
    """

    num_warps: int
    programs_per_sm: int
    writers: int = 1
    prefetch_distance_per_sm: int = 0

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return 256 * self.num_warps

    def reduce_residency(self, call: GroupNormForwardCall) -> Self | None:
        chunks = cdiv(call.sample.aligned_group_length, self.chunk_elements)
        return fit_resident_programs(self, call, chunks * 8 * call.held_bytes)

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one launch with one program per group or, if groups are few, up to `writers`
        programs per group.
        """
        rows, sample = call.n * call.sample.groups, call.sample
        multiprocessors = count_multiprocessors(call.x.device)
        writers = count_writers_per_group(rows, self.writers, multiprocessors)
        chunks = cdiv(sample.aligned_group_length, self.chunk_elements)
        arguments = (
            *call.tensors, *call.statistics, writers,
            self.prefetch_distance_per_sm * multiprocessors if writers == 1 else 0,
            call.group_vectors, *call.fragment_indexing, call.options.eps, *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            **call.make_chunk_options(self.chunk_elements, chunks, self.num_warps),
            "FULL": count_full_chunks(
                sample.group_length, self.chunk_elements, chunks, call.has_one_lane_per_thread
            ),
            "SKEWED": call.is_skewed,
            "PREFETCH": call.can_prefetch_groups,
            "PARAMETERS": call.find_parameter_unit(self.chunk_elements, self.chunk_elements * chunks),
            "SHARED": writers > 1,
            # Shared groups are few, so each program has a multiprocessor of its own.
            "maxnreg": compute_max_registers(replace(self, programs_per_sm=1) if writers > 1 else self),
            **call.options.constexprs,
        }
        return [Launch(group_norm_nchw_forward_resident_kernel, (rows * writers,), arguments, options)]


@triton.jit(
    do_not_specialize=[
        "writers", "ahead", "group_units", "groups", "channels", "channel_length", "magic", "division_shift",
        "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_forward_resident_kernel(
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
    writers: tl.int32,
    ahead: tl.int32,
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
    PREFETCH: tl.constexpr,
    PARAMETERS: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y of one group per program.  The group is read once and held in registers.

    If SHARED, `writers` programs, a power of two, have each group.  Each of them reads the whole group,
    computes its moments with the same bits as a single program, and writes a share of its chunks.  This is
    for launches of fewer groups than multiprocessors, where several reads out of L2 cost less than an
    exchange.  A program prefetches the group of the program `ahead` programs later into L2.
    """
    if SHARED:
        row = (tl.program_id(0) // writers).to(tl.int64)
        writer = tl.program_id(0) % writers
    else:
        row = tl.program_id(0).to(tl.int64)
        writer = 0
    length = group_units * VEC
    base, before = locate_frame(row, length, GROUP, SKEWED)
    end = before + length
    indexing = (groups, channels, channel_length, magic, division_shift, scale_stride)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)

    chunks = load_group_fragment(x_ptr, base, end, FULL, BLOCK, CHUNKS, GROUP, "", SKEWED)
    residuals = load_group_fragment(residual_ptr, base, end, FULL, BLOCK, CHUNKS, GROUP, "", SKEWED)
    if PREFETCH:
        if tl.num_programs(0) <= FEW_PROGRAMS * 2:
            # Nothing else hides the latency of the parameters.
            if weight_ptr is not None:
                prefetch_lines(weight_ptr + (row % groups) * channels, channels)
            if bias_ptr is not None:
                prefetch_lines(bias_ptr + (row % groups) * channels, channels)
        if ahead > 0 and tl.program_id(0) + ahead < tl.num_programs(0):
            next_base, next_before = locate_frame(row + ahead, length, GROUP, SKEWED)
            prefetch(x_ptr + next_base, round_up_to_vectors(next_before + length, GROUP))
    count, means, rests, squares = compute_group_lane_moments(
        chunks, residuals, before, end, FULL, BLOCK, GROUP, SKEWED=SKEWED
    )
    mean, rest, square = reduce_lane_moments(count, means, rests, squares, FULL == CHUNKS and not SKEWED)
    mean, rest = unify_mean_across_threads(mean, rest, means, tl.arange(0, BLOCK // GROUP)[:, None], PARAMETERS)
    rstd = approximate_rsqrt(square / length.to(tl.float32) + eps)
    if mean_ptr is not None:  # noqa: SIM102 (a constexpr and a run-time condition)
        if writer == 0:
            tl.store(mean_ptr + row, mean + rest)
            tl.store(rstd_ptr + row, rstd)
    affine = load_chunk_affine(parameters, row, -before, indexing, 0, BLOCK, GROUP, PARAMETERS)
    store_normalised_group_fragment(
        chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, base, row, -before, before, end, length,
        indexing, mean, rest, rstd, (seed, dropout_threshold, dropout_scale, negative_slope), writer, writers,
        FULL, BLOCK, GROUP, PARAMETERS, SHARED, "", ACTIVATION, DROPOUT, SKEWED,
    )  # fmt: skip
