"""From dy back to dz, and the affine step of a channel in its sample: what GroupNorm's backward kernels share.

z = x_hat * slope + offset with slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift, each of the
four present or not, and dz = dy * act'(z), dropout's factor included.  For 16-bit results silu and gelu_tanh take
the hardware's tanh of z / 2, and 2 dz costs an instruction less than dz: kernels work with GAIN * dz and with
slopes and offsets over GAIN, where GAIN is 1 or 2; sums of GAIN * dz are put right once, at their end.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activation_derivative, dropout_keep, tanh
from fusednorm.ops.group_norm.affine import load_masked_affine

_TANH_SLOPE = tl.constexpr(2.0 * 0.7978845608028654)
_TANH_CUBIC = tl.constexpr(8.0 * 0.7978845608028654 * 0.044715)


def derivative_gain(activation: str, itemsize: int) -> float:
    """GAIN of kernels over elements of `itemsize` bytes."""
    return 2.0 if itemsize == 2 and activation in ("silu", "gelu_tanh") else 1.0


@triton.jit
def load_gained_affine(parameters, channel, sample_channel, mask, GAIN: tl.constexpr):
    """`load_masked_affine`, slope and offset over GAIN."""
    slope, offset = load_masked_affine(parameters, channel, sample_channel, mask)
    return slope * (1.0 / GAIN), offset * (1.0 / GAIN)


@triton.jit
def gained_gradient(
    dy,
    argument,
    slope,
    offset,
    sample,
    position,
    seed,
    dropout_threshold,
    dropout_scale,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    GAIN: tl.constexpr,
    FAST: tl.constexpr,
):
    """GAIN * dz of a tile, with z / GAIN = argument * slope + offset."""
    if DROPOUT:
        keep = dropout_keep(seed, sample, position, dropout_threshold)
        dy = tl.where(keep, dy * dropout_scale, 0.0)
    if ACTIVATION == "none":
        return dy
    elif GAIN == 1.0:
        return dy * activation_derivative(argument * slope + offset, ACTIVATION, FAST)
    else:
        half = argument * slope + offset
        if ACTIVATION == "silu":
            t = tanh(half, FAST)
            rise = half
        else:
            square = half * half
            t = tanh(half * (square * _TANH_CUBIC + _TANH_SLOPE), FAST)
            rise = half * (square * (3.0 * _TANH_CUBIC) + _TANH_SLOPE)
        # act(z) = half + half * tanh(...), so 2 act'(z) = 1 + t + rise * (1 - t^2).
        return dy + dy * (t + rise * (1.0 - t * t))
