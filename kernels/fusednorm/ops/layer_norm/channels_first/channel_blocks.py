"""Blocks of channels that are loaded one after another, for samples with more channels than a program holds."""

import triton
import triton.language as tl

from fusednorm.jit.loads import load_row_residual_sum, make_column_mask
from fusednorm.jit.moments import compute_mean_and_variance_from_lane_sums
from fusednorm.ops.layer_norm.channels_first.position_tiles import (
    compute_addend,
    compute_factor,
    load_channel_parameter,
    make_block_offsets,
    select_gate,
)

SUMMED_BLOCKS = tl.constexpr(64)
"""The number of terms that one float32 sum adds up before it is added to another: sums of thousands lose digits."""


@triton.jit
def load_channel_block(
    x_ptr, residual_ptr, gate_ptr, start, modulation, first_channel, position, position_mask, channels, positions,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load x, and h = residual + gate * x, of the channels from `first_channel` on.

    Returns offsets, mask, x in the dtype of memory, and h, [BLOCK_C, BLOCK_P], and the gate as a tuple of one tile
    [BLOCK_C, 1] or of none.  `start` and `modulation` are the offsets of the sample in x and in the gate.
    """
    mask = make_column_mask(first_channel + tl.arange(0, BLOCK_C)[:, None], channels, False) & position_mask
    at = start + first_channel.to(tl.int64) * positions + make_block_offsets(position, positions, BLOCK_C)
    gates = load_channel_parameter(gate_ptr, modulation + first_channel, channels - first_channel, 0, BLOCK_C, 1)
    gate = select_gate(gates, 0)
    x, h = load_row_residual_sum(x_ptr, residual_ptr, gate, at, at, mask, "")
    return at, mask, x, h, gate


@triton.jit
def load_factor_and_addend(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, modulation, first_channel, channels,
    BLOCK_C: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """Load the factor and the addend of the affine steps from `first_channel` on, [BLOCK_C, 1] float32.

    z = x_hat * factor + addend.  The addend is 0 without HAS_ADDEND.
    """
    left = channels - first_channel
    weights = load_channel_parameter(weight_ptr, first_channel, left, 0, BLOCK_C, 1)
    scales = load_channel_parameter(scale_ptr, modulation + first_channel, left, 0, BLOCK_C, 1)
    biases = ()
    shifts = ()
    if HAS_ADDEND:
        biases = load_channel_parameter(bias_ptr, first_channel, left, 0, BLOCK_C, 1)
        shifts = load_channel_parameter(shift_ptr, modulation + first_channel, left, 0, BLOCK_C, 1)
    factor = compute_factor(weights, scales, 0, BLOCK_C, WEIGHT_OFFSET)
    addend = compute_addend(biases, scales, shifts, 0, BLOCK_C)
    return factor, addend


@triton.jit
def compute_swept_mean_and_variance(
    x_ptr, residual_ptr, gate_ptr, start, modulation, position, position_mask, channels, positions,
    BLOCK_C: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """Compute the mean of each position, in two parts (rough + shift), and its variance, from blocks of channels.

    Returns [1, BLOCK_P] each; the sample has at least BLOCK_C channels.  The mean is rough + shift: subtract rough
    first, then shift.  For RMSNorm both are 0, and the variance is the mean of squares.

    A lane is every BLOCK_C-th channel.  Its pivot is its first value, and after SUMMED_BLOCKS more the mean of all
    these: about a value that is a few standard deviations from the mean, sums of thousands lose digits.
    """
    n = channels.to(tl.float32)
    zero = tl.full((), 0, tl.int32)
    _, _, _, pivot, _ = load_channel_block(
        x_ptr, residual_ptr, gate_ptr, start, modulation, zero, position, position_mask, channels, positions,
        BLOCK_C,
    )  # fmt: skip
    sum_1 = tl.zeros(pivot.shape, tl.float32)
    if IS_RMS:
        sum_2 = sum_1 + pivot * pivot
    else:
        sum_2 = tl.zeros(pivot.shape, tl.float32)
    count = tl.full(pivot.shape, 1.0, tl.float32)
    blocks = tl.cdiv(channels, BLOCK_C)
    for first_block in range(1, blocks, SUMMED_BLOCKS):
        run_1 = tl.zeros(pivot.shape, tl.float32)
        run_2 = tl.zeros(pivot.shape, tl.float32)
        for block in range(first_block, tl.minimum(first_block + SUMMED_BLOCKS, blocks)):
            first_channel = block * BLOCK_C
            _, _, _, h, _ = load_channel_block(
                x_ptr, residual_ptr, gate_ptr, start, modulation, first_channel, position, position_mask,
                channels, positions, BLOCK_C,
            )  # fmt: skip
            if IS_RMS:
                run_2 += h * h
            else:
                exists = first_channel + tl.arange(0, BLOCK_C)[:, None] < channels
                d = tl.where(exists, h - pivot, 0.0)
                run_1 += d
                run_2 += d * d
                count += exists.to(tl.float32)
        sum_1 += run_1
        sum_2 += run_2
        if not IS_RMS:  # noqa: SIM102 (a constexpr and a run-time condition)
            if first_block == 1:
                nearer = pivot + sum_1 / count
                move = nearer - pivot
                moved_sum = sum_1 - count * move
                sum_2 -= move * (sum_1 + moved_sum)
                sum_1 = moved_sum
                pivot = nearer
    if IS_RMS:
        rough = tl.zeros((1, pivot.shape[1]), tl.float32)
        shift = rough
        variance = tl.sum(sum_2, 0, keep_dims=True) / n
    else:
        rough, shift, variance = compute_mean_and_variance_from_lane_sums(pivot, sum_1, sum_2, count, n)
    return rough, shift, variance
