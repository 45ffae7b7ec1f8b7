"""Forward kernels of GroupNorm in two sweeps of pieces, for what fits neither one program nor the chip.

A kernel for the moments of every piece, then, after `group_norm_fold_moments_kernel`, one that reads x again.  No
program waits for another.  A program loads its whole piece at once; the second kernel walks backwards, so that the
end of x is still in L2.
"""

import triton
import triton.language as tl

from fusednorm.jit.early_start import await_previous, let_next_start
from fusednorm.jit.pieces import total_moments
from fusednorm.ops.group_norm.contiguous.pieces import lane_moments, load_chunk_affine, load_chunks, write_chunks


@triton.jit(do_not_specialize=["group_units", "groups", "splits"])
def group_norm_nchw_split_moments_kernel(
    x_ptr,
    residual_ptr,
    mean_part_ptr,
    square_part_ptr,
    group_units: tl.int64,
    groups: tl.int32,
    splits: tl.int32,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Moments of one piece of a contiguous group; parts lie as [N, splits, G]."""
    let_next_start(EARLY)
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    split = program - row * splits
    length = group_units * VEC
    first = split * (CHUNKS * BLOCK)
    left = tl.minimum(length - first, CHUNKS * BLOCK).to(tl.int32)
    at = row * length + first
    chunks = load_chunks(x_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_last")
    residuals = load_chunks(residual_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_last")
    count, means, rests, squares = lane_moments(chunks, residuals, 0, left, FULL, BLOCK, GROUP, FAST)
    mean, rest, square = total_moments(count, means, rests, squares, FULL == CHUNKS, FAST)
    sample = row // groups
    slot = (sample * splits + split) * groups + (row - sample * groups)
    tl.store(mean_part_ptr + slot, mean + rest)
    tl.store(square_part_ptr + slot, square)


@triton.jit(
    do_not_specialize=[
        "group_units", "groups", "channels", "channel_length", "magic", "division_shift", "scale_stride", "splits",
        "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_split_apply_kernel(
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
    group_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    channel_length: tl.int64,
    magic: tl.int64,
    division_shift: tl.int32,
    scale_stride: tl.int64,
    splits: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMETERS: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one piece of a contiguous group."""
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = program // splits
    length = group_units * VEC
    first = (program - row * splits) * (CHUNKS * BLOCK)
    left = tl.minimum(length - first, CHUNKS * BLOCK).to(tl.int32)
    if not WIDE:
        first = first.to(tl.int32)
    at = row * length + first
    walk = (groups, channels, channel_length, magic, division_shift, scale_stride)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    chunks = load_chunks(x_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_first")
    residuals = load_chunks(residual_ptr, at, left, FULL, BLOCK, CHUNKS, GROUP, "evict_first")
    await_previous(EARLY)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    affine = load_chunk_affine(parameters, row, first, walk, 0, BLOCK, GROUP, PARAMETERS, WIDE)
    write_chunks(
        chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, at, row, first, 0, left, length, walk,
        mean, 0.0, rstd, (seed, dropout_threshold, dropout_scale), 0, 1,
        FULL, BLOCK, GROUP, PARAMETERS, WIDE, False, "evict_first", ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
