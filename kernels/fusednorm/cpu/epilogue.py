"""The activations and their derivatives in float32: torch's kernels, or the formulas of `arguments.activations`."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusednorm.arguments.activations import ACTIVATIONS

_ATEN = torch.ops.aten


def activated(z: Tensor, activation: str) -> Tensor:
    """act(z), or z itself without an activation."""
    match activation:
        case "relu":
            return torch.relu(z)
        case "silu":
            return F.silu(z)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "none":
            return z
    return ACTIVATIONS[activation].apply(z)


def through_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """dy * act'(z), the gradient of z."""
    match activation:
        case "relu":
            gradient: Tensor = _ATEN.threshold_backward(dy, z, 0)
        case "silu":
            gradient = _ATEN.silu_backward(dy, z)
        case "gelu":
            gradient = _ATEN.gelu_backward(dy, z)
        case "gelu_tanh":
            gradient = _ATEN.gelu_backward(dy, z, approximate="tanh")
        case "none":
            gradient = dy
        case _:
            gradient = dy * ACTIVATIONS[activation].derivative(z)
    return gradient
