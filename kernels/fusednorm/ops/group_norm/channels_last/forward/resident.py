"""Forward pass of channels-last samples whose column blocks one program holds."""

from dataclasses import dataclass, replace
from typing import Self

import triton
import triton.language as tl

from fusednorm.devices.device_properties import count_multiprocessors
from fusednorm.integers import cdiv
from fusednorm.jit.approximations import approximate_rsqrt
from fusednorm.launch.launches import Launch, compute_max_registers
from fusednorm.ops.group_norm.call import (
    GroupNormForwardCall,
    GroupNormForwardConfig,
    count_writers_per_group,
    fit_resident_programs,
)
from fusednorm.ops.group_norm.channels_last.block_fragments import (
    compute_group_moments,
    compute_lane_columns,
    compute_lane_rows,
    expand_groups_to_columns,
    load_block_rows,
    load_columns_as_tuple,
    make_block_options,
    make_block_tile,
    store_group_statistics,
    store_normalised_rows,
)


@dataclass(frozen=True, slots=True)
class ForwardResidentBlock(GroupNormForwardConfig):
    """A configuration in which each program holds one block of `block_groups` groups of a sample in registers.

    The block is held in the dtype of memory; each chunk of positions has 16 bytes per thread.  The other
    fields are those of `GroupNormForwardResident`.
    """

    block_groups: int
    num_warps: int
    programs_per_sm: int
    writers: int = 1

    def reduce_residency(self, call: GroupNormForwardCall) -> Self | None:
        tile = make_block_tile(call.sample, self.block_groups, self.num_warps, call.x.element_size())
        return fit_resident_programs(self, call, cdiv(call.sample.hw, tile.positions) * tile.vec * call.held_bytes)

    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the pass as one launch: one program per block or, if blocks are few, up to `writers` programs per
        block.
        """
        sample = call.sample
        blocks = cdiv(sample.groups, self.block_groups)
        units = call.n * blocks
        writers = count_writers_per_group(units, self.writers, count_multiprocessors(call.x.device))
        tile = make_block_tile(sample, self.block_groups, self.num_warps, call.x.element_size())
        arguments = (
            *call.tensors, *call.statistics, writers, sample.hw, sample.c // tile.vec, sample.groups,
            sample.group_channels, blocks, self.block_groups, call.options.eps, call.affine.sample_stride,
            *call.options.epilogue_arguments,
        )  # fmt: skip
        options = {
            **make_block_options(sample, self.block_groups, self.num_warps, tile),
            "CHUNKS": cdiv(sample.hw, tile.positions),
            "FULL": sample.hw // tile.positions,
            "SHARED": writers > 1,
            # Shared groups are few, so each program has a multiprocessor of its own.
            "maxnreg": compute_max_registers(replace(self, programs_per_sm=1) if writers > 1 else self),
            **call.options.constexprs,
        }
        return [Launch(group_norm_nhwc_forward_resident_kernel, (units * writers,), arguments, options)]


@triton.jit(
    do_not_specialize=[
        "writers", "hw", "column_units", "groups", "channels", "blocks", "block_groups",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nhwc_forward_resident_kernel(
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
    hw: tl.int32,
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
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Write y.  Each program handles one block of complete groups of a sample, and reads the block once.

    If SHARED, `writers` programs have each block.  Each of them computes all moments and writes a share of
    the chunks: see `group_norm_nchw_forward_resident_kernel`.
    """
    program = tl.program_id(0)
    if SHARED:
        unit = program // writers
        writer = program % writers
    else:
        unit = program
        writer = 0
    sample = (unit // blocks).to(tl.int64)
    block = unit % blocks
    c = column_units * VEC
    block_units = block_groups * channels // VEC
    column, column_mask = compute_lane_columns(block, block_units, column_units, ROWS, CV, VEC, EVEN)
    at = compute_lane_rows(ROWS, CV).to(tl.int64) * c + column
    stride = c.to(tl.int64)
    base = sample * hw * c
    group = tl.arange(0, GROUPS)
    run = tl.arange(0, CV * SUMS) * (VEC // SUMS)
    membership = (run // channels)[:, None] == group[None, :]
    group_mask = group < tl.minimum(block_groups, groups - block * block_groups)

    chunks = load_block_rows(x_ptr, base, at, stride, hw, column_mask, FULL, ROWS, CHUNKS, "")
    residuals = load_block_rows(residual_ptr, base, at, stride, hw, column_mask, FULL, ROWS, CHUNKS, "")
    affine = (
        load_columns_as_tuple(weight_ptr, column, column_mask),
        load_columns_as_tuple(bias_ptr, column, column_mask),
        load_columns_as_tuple(scale_ptr, sample * scale_stride + column, column_mask),
        load_columns_as_tuple(shift_ptr, sample * scale_stride + column, column_mask),
    )
    length = (hw * channels).to(tl.float32)
    mean, rest, square = compute_group_moments(chunks, residuals, hw, channels, membership, FULL, ROWS, SUMS)
    rstd = approximate_rsqrt(square / length + eps)
    store_group_statistics(
        mean_ptr,
        rstd_ptr,
        mean,
        rest,
        rstd,
        sample * groups + block * block_groups + group,
        group_mask & (writer == 0),
    )
    store_normalised_rows(
        chunks, residuals, affine, y_ptr, residual_out_ptr, base, at, stride, hw, column_mask,
        expand_groups_to_columns(mean, membership, ROWS, SUMS, VEC),
        expand_groups_to_columns(rest, membership, ROWS, SUMS, VEC),
        expand_groups_to_columns(rstd, membership, ROWS, SUMS, VEC), sample, 0,
        (seed, dropout_threshold, dropout_scale, negative_slope), writer, writers,
        FULL, ROWS, SHARED, "", ACTIVATION, DROPOUT,
    )  # fmt: skip
