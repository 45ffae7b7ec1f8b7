"""Forward kernel of GroupNorm for contiguous groups that persistent programs hold one after another."""

import triton
import triton.language as tl

from fusednorm.jit.pieces import total_moments
from fusednorm.jit.prefetch import prefetch
from fusednorm.ops.group_norm.contiguous.pieces import (
    element_of_chunk,
    lane_moments,
    load_chunk_affine,
    same_for_all,
    write_chunk,
)
from fusednorm.ops.group_norm.contiguous.words import load_words, widened_words


@triton.jit(
    do_not_specialize=[
        "rows", "group_units", "groups", "channels", "channel_length", "magic", "division_shift",
        "scale_stride", "seed", "dropout_threshold",
    ]
)  # fmt: skip
def group_norm_nchw_rolling_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows: tl.int64,
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
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    PARAMETERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """A group at a time in registers: as a chunk of it is written, that of the program's next group is asked for.

    The group AHEAD turns on, of `rows` in all, is asked into L2 before.
    """
    length = group_units * VEC
    walk = (groups, channels, channel_length, magic, division_shift, scale_stride)
    parameters = (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    dropout = (seed, dropout_threshold, dropout_scale)
    element = element_of_chunk(BLOCK, GROUP)
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    words = ()
    for i in tl.static_range(CHUNKS):
        words = words + (load_words(x_ptr, row * length, length, True, i, FULL, BLOCK, GROUP),)
    while row < rows:
        base = row * length
        wanted = row + step < rows
        if AHEAD > 0 and row + AHEAD * step < rows:
            prefetch(x_ptr + base + AHEAD * step * length.to(tl.int64), length)
        count, means, rests, squares = lane_moments(
            words, (), 0, length, FULL, BLOCK, GROUP, FAST, x_ptr.dtype.element_ty
        )
        mean, rest, square = total_moments(count, means, rests, squares, FULL == CHUNKS, FAST)
        mean, rest = same_for_all(mean, rest, means, tl.arange(0, BLOCK // GROUP)[:, None], PARAMETERS)
        rstd = 1.0 / tl.sqrt(square / length.to(tl.float32) + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean + rest)
            tl.store(rstd_ptr + row, rstd)
        # 0, computed anew each turn, and with it the channels of all chunks: kept, they would fill the registers.
        first = tl.minimum(row, 0).to(tl.int32)
        affine = load_chunk_affine(parameters, row, first, walk, 0, BLOCK, GROUP, PARAMETERS, False)
        next_words = ()
        for i in tl.static_range(CHUNKS):
            current = affine
            if PARAMETERS != "piece" and i + 1 < CHUNKS:
                affine = load_chunk_affine(parameters, row, first, walk, i + 1, BLOCK, GROUP, PARAMETERS, False)
            write_chunk(
                widened_words(words[i], x_ptr.dtype.element_ty, FAST), current, y_ptr, None,
                base + i * BLOCK, 0, length - i * BLOCK, row, i * BLOCK, length, walk, mean, rest, rstd, dropout,
                element, i < FULL, GROUP, PARAMETERS, "", ACTIVATION, DROPOUT, FAST,
            )  # fmt: skip
            next_at = base + step * length.to(tl.int64)
            next_words = next_words + (load_words(x_ptr, next_at, length, wanted, i, FULL, BLOCK, GROUP),)
        words = next_words
        row += step
