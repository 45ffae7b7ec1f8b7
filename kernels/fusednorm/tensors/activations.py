"""The activations that may follow the affine step, and their derivatives, in plain torch.

`jit.epilogue` implements them for kernels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusednorm.arguments.checks import DEFAULT_SLOPE, validate_activation

_TANH_SCALE, _TANH_CUBE = math.sqrt(2.0 / math.pi), 0.044715


class Activation(NamedTuple):
    """An activation and its derivative; both keep the floating dtype of their argument.

    Attributes:
        apply: act(z).
        derivative: act'(z); relu's is 0 at 0, and leaky_relu's its slope.
    """

    apply: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _relu_derivative(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


def _leaky_relu_derivative(z: Tensor, negative_slope: float) -> Tensor:
    return torch.ones_like(z).where(z > 0, negative_slope)


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def _silu_derivative(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def _gelu(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.erf(z * math.sqrt(0.5)))


def _gelu_derivative(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5))) + z * density


def _gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(_TANH_SCALE * (z + _TANH_CUBE * z**3)))


def _gelu_tanh_derivative(z: Tensor) -> Tensor:
    t = torch.tanh(_TANH_SCALE * (z + _TANH_CUBE * z**3))
    slope = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * z * z)
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope


_FUNCTIONS = {
    "none": Activation(lambda z: z, torch.ones_like),
    "relu": Activation(torch.relu, _relu_derivative),
    "silu": Activation(_silu, _silu_derivative),
    "gelu": Activation(_gelu, _gelu_derivative),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_derivative),
}


def activation_of(name: str, negative_slope: float = DEFAULT_SLOPE) -> Activation:
    """Return the function and the derivative of the activation with this name.

    Raises:
        KernelInputError: there is no such activation.
    """
    validate_activation(name)
    if name == "leaky_relu":
        return Activation(
            partial(F.leaky_relu, negative_slope=negative_slope),
            partial(_leaky_relu_derivative, negative_slope=negative_slope),
        )
    return _FUNCTIONS[name]
