"""Norms without options by torch's differentiable functions, whose derivatives need no Python."""

import math
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.checks import DEFAULT_SLOPE
from fusednorm.arguments.options import OptionValues
from fusednorm.cpu import torch_group_norm, torch_row_norms
from fusednorm.cpu.supported_arguments import has_float_tensors, is_valid_eps, make_ones, to_float32
from fusednorm.tensors.arrays import FLOAT_DTYPES
from fusednorm.tensors.layouts import convert_to_layout


def try_torch_norm(values: OptionValues, tensors: tuple[Any, ...], needs_gradient: bool) -> Tensor | None:
    """Compute a norm without weight offset, activation and dropout by torch's own CPU functions, or return None.
    Autograd differentiates these functions directly.

    The result is None if a residual, scale, shift, gate or layout is given, or if torch cannot compute the call or
    is less accurate than this package.

    `values` are the fields of `NormOptions`, and `tensors` those of `NormInputs`, in order.  The last
    argument is as in `try_layer_norm`.
    """
    op, num_groups, eps, _, _, _, _, _, layout = values
    x, weight, bias, *others = tensors
    if layout is not None or any(tensor is not None for tensor in others):
        return None
    if op == "layer_norm":
        return try_layer_norm(x, weight, bias, eps, needs_gradient)
    if op == "rms_norm":
        return try_rms_norm(x, weight, eps, needs_gradient)
    return try_group_norm(x, num_groups, weight, bias, eps, needs_gradient)


def try_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, needs_gradient: bool
) -> Tensor | None:
    """Compute LayerNorm over the last axis by torch's own CPU function.

    The result is None if torch cannot compute the call, or is less accurate than this package.

    Args:
        x: [..., cols].
        weight, bias: [cols], or None.
        eps: added to the variance.
        needs_gradient: whether the result will be differentiated: torch sums gradients of parameters in x's dtype.
    """
    dtype = x.dtype
    if dtype not in FLOAT_DTYPES or (needs_gradient and dtype != torch.float32):
        return None
    cols = x.shape[-1:]
    # Rows of one value: see `torch_row_norms.can_compute`.
    if not (is_valid_eps(eps) and cols and cols[0] > 1 and x.numel() and has_float_tensors(cols, weight, bias)):
        return None
    return torch.layer_norm(x, cols, to_float32(weight), to_float32(bias), eps, False)


def try_rms_norm(x: Tensor, weight: Tensor | None, eps: float, needs_gradient: bool) -> Tensor | None:
    """Compute RMSNorm over the last axis by `torch_row_norms`; None if the result will be differentiated.

    torch has no derivative of its own for RMSNorm.
    """
    return None if needs_gradient else torch_row_norms.rms_norm_forward(x, weight, eps=eps).y


def try_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, needs_gradient: bool
) -> Tensor | None:
    """Compute GroupNorm of [N, C, *spatial] by torch's own CPU function.

    The result is None if torch cannot compute the call, or is less accurate than this package, or would
    crash.

    Args:
        x: contiguous or channels-last.
        num_groups: divides C.
        weight, bias: [C], or None.
        eps: added to the variance.
        needs_gradient: whether the result will be differentiated: torch has no gradient of a bias without a weight,
            and without a weight it keeps statistics in x's dtype.
    """
    if not torch_group_norm.can_compute(x, num_groups, weight, bias, None, eps, "none", DEFAULT_SLOPE, 0.0):
        return None
    if needs_gradient and weight is None and (bias is not None or x.dtype != torch.float32):
        weight = make_ones(x.shape[1])
    weight, bias = to_float32(weight), to_float32(bias)
    if x.is_contiguous():
        return torch.group_norm(convert_to_layout(x, False), num_groups, weight, bias, eps, False)
    # torch writes to the gradient of a channels-last x even if there is none, and crashes.
    if needs_gradient and not x.requires_grad:
        return None
    if torch_group_norm.is_faster_contiguous(x, num_groups, backward=needs_gradient):
        return None
    n, c = x.shape[:2]
    h = convert_to_layout(x, True)
    y, mean, rstd = torch.native_group_norm(h, weight, bias, n, c, math.prod(x.shape[2:]), num_groups, eps)
    return None if torch_group_norm.has_distant_mean(mean, rstd) else y
