"""Conditions under which torch's norms compute a call; `fusednorm.cpu.fallback_passes` computes the others."""

import math

import torch
from torch import Tensor

from fusednorm.arguments.checks import validate_activation, validate_negative_slope
from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT_DTYPES

Shape = tuple[int, ...]


def has_float_tensors(shape: Shape, *tensors: Tensor | None) -> bool:
    """Return whether each tensor is None, or on the CPU, of the given shape and float32, float16 or bfloat16."""
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype in FLOAT_DTYPES and tensor.is_cpu and tensor.shape == shape):
            return False
    return True


def is_valid_eps(eps: float) -> bool:
    """Return whether a number may be added to a variance."""
    return type(eps) in (float, int) and 0.0 <= eps < math.inf


def is_zero_dropout(dropout: float) -> bool:
    """Return whether a probability is a number and 0."""
    return type(dropout) in (float, int) and dropout == 0.0


def is_valid_activation(activation: str, negative_slope: float) -> bool:
    """Return whether there is an activation of that name, and it takes that slope."""
    try:
        validate_activation(activation)
        validate_negative_slope(negative_slope, activation)
    except KernelInputError:
        return False
    return True


def has_torch_options(eps: float, activation: str, negative_slope: float, dropout: float) -> bool:
    """Return whether eps and activation are valid and there is no dropout, as torch's norms need."""
    return is_valid_eps(eps) and is_valid_activation(activation, negative_slope) and is_zero_dropout(dropout)


def is_valid_offset(weight_offset: float, weight: Tensor | None) -> bool:
    """Return whether weight_offset is 0, or 1 with a weight."""
    return weight_offset == 0.0 or (weight_offset == 1.0 and weight is not None)


def to_float32(tensor: Tensor | None) -> Tensor | None:
    """Convert a tensor to float32, without a copy if it already is."""
    return tensor if tensor is None or tensor.dtype == torch.float32 else tensor.float()


def make_ones(count: int) -> Tensor:
    """Return that many ones in float32: with them, statistics and gradients have the dtype of parameters."""
    return torch.ones(count, dtype=torch.float32, device="cpu")


def add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """Compute x + residual in float32; without a residual, return x in float32."""
    if residual is None:
        return x.float()
    # torch would round the sum of two 16-bit tensors; a copy of x is used for the sum.
    return x + residual if x.dtype == torch.float32 else x.float().add_(residual)


def cast_gradient(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Cast the gradient to its parameter's dtype; None without a parameter."""
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
