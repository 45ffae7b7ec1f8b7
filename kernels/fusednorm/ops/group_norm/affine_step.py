"""GroupNorm's affine step: weight and bias of a channel, then scale and shift of a channel in a sample.

y = act((x_hat * weight + bias) * (1 + scale) + shift), where each of the four is optional.  Loaded values keep
their dtype until they are used, so that the code may load them early.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.jit.loads import add_one


class AffineParameters(NamedTuple):
    """The optional parameters of a GroupNorm call: weight and bias per channel; scale and shift per sample and
    channel.

    Attributes:
        weight, bias: [C].
        scale, shift: [N, C], both with the same stride between samples.
    """

    weight: Array | None = None
    bias: Array | None = None
    scale: Array | None = None
    shift: Array | None = None

    @property
    def sample_stride(self) -> int:
        """The stride of scale and shift between samples; 0 if there is one sample or neither tensor."""
        tensor = self.shift if self.scale is None else self.scale
        return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


@triton.jit
def _load_as_tuple(ptr, at):
    """Load a tile or a scalar at ptr + at as a tuple of one item.  If ptr is None, return an empty tuple."""
    loaded = ()
    if ptr is not None:
        loaded = loaded + (tl.load(ptr + at),)
    return loaded


@triton.jit
def load_affine_as_tuples(parameters, channel, sample_channel):
    """Load weight, bias, scale and shift, each as a tuple of one item.  The tuple of an absent one is empty.

    Args:
        parameters: the four pointers, weight and bias [C], scale and shift [N, C].
        channel: a scalar or tile of numbers below C.
        sample_channel: sample * C + channel.
    """
    return (
        _load_as_tuple(parameters[0], channel),
        _load_as_tuple(parameters[1], channel),
        _load_as_tuple(parameters[2], sample_channel),
        _load_as_tuple(parameters[3], sample_channel),
    )


@triton.jit
def _load_weight(weight_ptr, channel, mask):
    """Load the weight of each channel in float32.  Without a weight, return ones.

    The compiler removes a product with constant ones.
    """
    if weight_ptr is None:
        return tl.full(channel.shape, 1.0, tl.float32)
    else:
        return tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_bias(bias_ptr, channel, mask):
    """Load the bias of each channel in float32.  Without a bias, return zeros.

    Adding zeros costs nothing once the addition is fused with a product.
    """
    if bias_ptr is None:
        return tl.zeros(channel.shape, tl.float32)
    else:
        return tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_slope_and_offset(parameters, channel, sample_channel, mask):
    """Load the parameters and combine them: the affine step is x_hat * slope + offset.

    Return slope and offset in float32, of the shape of `channel`.  Masked elements have arbitrary finite
    values.
    """
    weight = _load_weight(parameters[0], channel, mask)
    bias = _load_bias(parameters[1], channel, mask)
    if parameters[2] is not None:
        factor = add_one(tl.load(parameters[2] + sample_channel, mask=mask, other=0.0))
        weight = weight * factor
        bias = bias * factor
    if parameters[3] is not None:
        bias = bias + tl.load(parameters[3] + sample_channel, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def compute_slope_and_offset(affine, rstd, mean_rest):
    """Compute a and b so that normalisation and affine step together are (h - mean) * a + b.

    The group's mean is mean + rest, because one float32 would be too inexact.  `affine` is the result of
    `load_affine_as_tuples`.
    """
    a = rstd
    if len(affine[0]) > 0:
        a = a * affine[0][0].to(tl.float32)
    b = -mean_rest * a
    if len(affine[1]) > 0:
        b = b + affine[1][0].to(tl.float32)
    if len(affine[2]) > 0:
        factor = add_one(affine[2][0])
        a = a * factor
        b = b * factor
    if len(affine[3]) > 0:
        b = b + affine[3][0].to(tl.float32)
    return a, b
