"""Activations with their derivatives, and dropout, in float32; an element's bits do not depend on its position.

torch's fused functions use other instructions for the last elements of a tensor, or of a thread's share, so the
bits of a row would depend on the other rows; those of exp, erf, tanh and plain arithmetic do not.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from normserve.backends.cpu.dropout import Dropout
from normserve.backends.cpu.pieces import parts

_SQRT_HALF = math.sqrt(0.5)
_TANH_GAIN, _TANH_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def finish_(z: Tensor, activation: str, dropout: Dropout | None = None, kept: Tensor | None = None) -> Tensor:
    """dropout(act(z)), in z's memory.

    Args:
        z: contiguous.
        kept: dropout's mask of z, bool.
    """
    if activation == "none" and dropout is None:
        return z
    flat = z.view(-1)
    for part in parts(z.numel()):
        activate_(flat[part], activation)
        if dropout is not None and kept is not None:
            flat[part].mul_(dropout.factors(kept.view(-1)[part]))
    return z


def through_epilogue(
    dy: Tensor,
    z: Tensor,
    activation: str,
    dropout: Dropout | None = None,
    kept: Tensor | None = None,
    *,
    overwrites_z: bool,
) -> Tensor:
    """dz = dy · keep / (1 - p) · act'(z) in float32; dy itself if it is that already.

    Args:
        dy, z: contiguous; z in float32.
        kept: dropout's mask of z, bool.
        overwrites_z: whether dz may be written to z's memory.
    """
    if activation == "none" and dropout is None:
        return dy.float()
    dz = z if overwrites_z else torch.empty_like(z)
    flat_dy, flat_z, flat_dz = dy.view(-1), z.view(-1), dz.view(-1)
    for part in parts(z.numel()):
        gradient = flat_dy[part].float()
        if dropout is not None and kept is not None:
            gradient = gradient * dropout.factors(kept.view(-1)[part])
        flat_dz[part] = through_activation(gradient, flat_z[part], activation)
    return dz


def activate_(z: Tensor, activation: str) -> Tensor:
    """act(z), in z's memory."""
    match activation:
        case "relu":
            return F.relu_(z)
        case "silu":
            return z.div_(_one_plus_exp_minus(z))
        case "gelu":
            return z.mul_(_normal_cdf(z))
        case "gelu_tanh":
            return z.mul_(_gelu_tanh(z).add_(1.0).mul_(0.5))
        case "none":
            return z
        case _:
            raise NotImplementedError(activation)


def through_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """dy · act'(z)."""
    match activation:
        case "relu":
            return torch.ops.aten.threshold_backward(dy, z, 0)  # type: ignore[no-any-return]
        case "silu":
            s = _one_plus_exp_minus(z).reciprocal_()
            return (1.0 - s).mul_(z).add_(1.0).mul_(s).mul_(dy)
        case "gelu":
            density = torch.square(z).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
            return density.mul_(z).add_(_normal_cdf(z)).mul_(dy)
        case "gelu_tanh":
            t = _gelu_tanh(z)
            slope = torch.square(z).mul_(3.0 * _TANH_CUBIC).add_(1.0).mul_(_TANH_GAIN)
            rising = (1.0 - torch.square(t)).mul_(z).mul_(slope)
            return rising.add_(t).add_(1.0).mul_(0.5).mul_(dy)
        case "none":
            return dy
        case _:
            raise NotImplementedError(activation)


def widened(tensor: Tensor | None) -> Tensor | None:
    """A parameter in float32."""
    return None if tensor is None else tensor.float()


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """h = x + residual in float32; x itself if it is that already."""
    if residual is None:
        return x.float()
    # Widened by the sum itself, without a copy of its own.
    return x + residual if x.dtype == torch.float32 else x.float().add_(residual)


def _one_plus_exp_minus(z: Tensor) -> Tensor:
    """1 + exp(-z), the reciprocal of the sigmoid."""
    return torch.neg(z).exp_().add_(1.0)


def _normal_cdf(z: Tensor) -> Tensor:
    """(1 + erf(z / √2)) / 2."""
    return torch.mul(z, _SQRT_HALF).erf_().add_(1.0).mul_(0.5)


def _gelu_tanh(z: Tensor) -> Tensor:
    """tanh(√(2 / π) · (z + 0.044715 · z³))."""
    return torch.square(z).mul_(_TANH_CUBIC).add_(1.0).mul_(z).mul_(_TANH_GAIN).tanh_()
