"""What follows x_hat in GroupNorm: weight and bias of a channel, then scale and shift of it in its sample.

y = act((x_hat * weight + bias) * (1 + scale) + shift), each of the four present or not.  What is loaded stays in
its own type until it is used, so that loads may be written some time before.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Affine(NamedTuple):
    """The four of a call.

    Attributes:
        weight, bias: [C].
        scale, shift: [N, C], with one stride from sample to sample.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def stride(self) -> int:
        """Elements from sample to sample of scale and of shift; 0 where it does not matter."""
        tensor = self.shift if self.scale is None else self.scale
        return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


@triton.jit
def _load_one(ptr, at):
    """(value,) or, where there is none, ()."""
    loaded = ()
    if ptr is not None:
        loaded = loaded + (tl.load(ptr + at),)
    return loaded


@triton.jit
def load_affine(parameters, channel, sample_channel):
    """weight, bias, scale and shift, a tuple of one value or of none each.

    Args:
        parameters: the four pointers, weight and bias [C], scale and shift [N, C].
        channel: a scalar or tile of numbers below C.
        sample_channel: sample * C + channel.
    """
    return (
        _load_one(parameters[0], channel),
        _load_one(parameters[1], channel),
        _load_one(parameters[2], sample_channel),
        _load_one(parameters[3], sample_channel),
    )


@triton.jit
def _load_weight(weight_ptr, channel, mask):
    """weight of each channel in float32; ones, which the compiler drops from a product, where there is none."""
    if weight_ptr is None:
        return tl.full(channel.shape, 1.0, tl.float32)
    else:
        return tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_bias(bias_ptr, channel, mask):
    """bias of each channel in float32; zeros, which cost a product nothing once fused, where there is none."""
    if bias_ptr is None:
        return tl.zeros(channel.shape, tl.float32)
    else:
        return tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_masked_affine(parameters, channel, sample_channel, mask):
    """What x_hat is multiplied by and what is added to it, float32; masked elements are anything finite."""
    weight = _load_weight(parameters[0], channel, mask)
    bias = _load_bias(parameters[1], channel, mask)
    if parameters[2] is not None:
        factor = 1.0 + tl.load(parameters[2] + sample_channel, mask=mask, other=0.0).to(tl.float32)
        weight = weight * factor
        bias = bias * factor
    if parameters[3] is not None:
        bias = bias + tl.load(parameters[3] + sample_channel, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def slope_and_offset(affine, rstd, rest):
    """a and b such that the result is (h - mean) * a + b, where the group's mean is mean + rest."""
    a = rstd
    if len(affine[0]) > 0:
        a = a * affine[0][0].to(tl.float32)
    b = -rest * a
    if len(affine[1]) > 0:
        b = b + affine[1][0].to(tl.float32)
    if len(affine[2]) > 0:
        factor = 1.0 + affine[2][0].to(tl.float32)
        a = a * factor
        b = b * factor
    if len(affine[3]) > 0:
        b = b + affine[3][0].to(tl.float32)
    return a, b
