"""Activations and their derivatives by torch's own kernels, in float32."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def activate_(z: Tensor, activation: str) -> Tensor:
    """act(z), in z's memory where torch can."""
    match activation:
        case "relu":
            return F.relu_(z)
        case "silu":
            return F.silu(z, inplace=True)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case _:
            return z


def through_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """dy · act'(z)."""
    match activation:
        case "relu":
            return torch.ops.aten.threshold_backward(dy, z, 0)  # type: ignore[no-any-return]
        case "silu":
            return torch.ops.aten.silu_backward(dy, z)  # type: ignore[no-any-return]
        case "gelu":
            return torch.ops.aten.gelu_backward(dy, z)  # type: ignore[no-any-return]
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(dy, z, approximate="tanh")  # type: ignore[no-any-return]
        case _:
            return dy


def widened(tensor: Tensor | None) -> Tensor | None:
    """A parameter in float32."""
    return None if tensor is None else tensor.float()


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """h = x + residual in float32; x itself if it is that already."""
    return x.float() if residual is None else x.float() + residual.float()
