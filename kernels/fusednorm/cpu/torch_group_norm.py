"""GroupNorm with torch's kernels, contiguous and channels-last."""

import math
from typing import Any

import torch
from torch import Tensor

from fusednorm.cpu import fallback_passes
from fusednorm.cpu.epilogue import activate_, backpropagate_activation_into_z_
from fusednorm.cpu.supported_arguments import (
    add_residual,
    has_float_tensors,
    has_torch_options,
    make_ones,
    to_float32,
)
from fusednorm.results import Backward, Forward
from fusednorm.tensors.layouts import convert_to_layout, is_in_layout

_FARTHEST_MEAN = 2.0
"""The largest |mean| of a channels-last group, in standard deviations.

torch's variance loses 1 + its square in accuracy.
"""

_FEW_POSITIONS = 1024
"""Below so many positions torch's forward kernel for channels-last tensors visits group after group."""

_backward_of_torch: Any = torch.ops.aten.native_group_norm_backward


def can_compute(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: str,
    negative_slope: float,
    dropout: float,
) -> bool:
    """Return whether torch's GroupNorm kernels support a call; if not, `fallback_passes` computes the call.

    They may still be less accurate for a channels-last x: see `has_distant_mean`.
    """
    shape = x.shape
    return (
        has_torch_options(eps, activation, negative_slope, dropout)
        and len(shape) > 1
        and type(num_groups) is int
        and num_groups > 0
        and shape[1] % num_groups == 0
        and has_float_tensors(shape, x, residual)
        and has_float_tensors(shape[1:2], weight, bias)
        and x.numel() > 0
        # torch has no kernel for channels-last tensors with another number of axes.
        and (x.is_contiguous() or (x.dim() in (4, 5) and is_in_layout(x, True)))
    )


def is_faster_contiguous(x: Tensor, num_groups: int, *, backward: bool) -> bool:
    """Return whether torch computes a channels-last x in less time by way of contiguous copies.

    Its kernels for channels-last tensors compute groups of few channels element by element: in 16-bit dtypes in
    every backward pass, and in all dtypes in both passes over few positions.
    """
    is_wide = x.dtype == torch.float32
    if x.is_contiguous() or x.shape[1] > num_groups * (1 if is_wide else 4):
        return False
    return math.prod(x.shape[2:]) < _FEW_POSITIONS or (backward and not is_wide)


def has_distant_mean(mean: Tensor, rstd: Tensor) -> bool:
    """Return whether a channels-last group's mean is NaN or far from zero: torch's variance has cancellation."""
    farthest = float(torch.linalg.vector_norm(mean.detach() * rstd.detach(), math.inf))
    return not farthest <= _FARTHEST_MEAN


def group_norm_forward(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    stats: bool = False,
) -> Forward:
    """Compute GroupNorm's forward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.group_norm_forward`.
    """
    options: dict[str, Any] = {"eps": eps, "activation": activation, "negative_slope": negative_slope}
    options["dropout"] = dropout
    computed = None
    can_compute_call = can_compute(x, num_groups, weight, bias, residual, **options) and scale is shift is None
    if can_compute_call and is_faster_contiguous(x, num_groups, backward=False):
        copied = None if residual is None else residual.contiguous()
        result = group_norm_forward(
            x.contiguous(), num_groups, weight, bias, residual=copied, stats=stats, **options
        )
        residual_out = None if result.residual_out is None else _copy_to_strides(x, result.residual_out)
        return result._replace(y=_copy_to_strides(x, result.y), residual_out=residual_out)
    if can_compute_call:
        is_wide = activation != "none" or residual is not None
        h = _convert_layout_like(x, x)
        h = add_residual(h, _convert_layout_like(x, residual)) if is_wide else h
        computed = _try_normalise(h, num_groups, weight, bias, eps)
    if computed is None:
        more: dict[str, Any] = {"residual": residual, "scale": scale, "shift": shift, "seed": seed, "stats": stats}
        more |= {"x": x, "num_groups": num_groups, "weight": weight, "bias": bias}
        return fallback_passes.compute_fallback_forward("group_norm", **options, **more)
    z, mean, rstd = computed
    return Forward(
        activate_(z, activation, negative_slope).to(x.dtype),
        mean if stats else None,
        rstd if stats else None,
        None if residual is None else h.to(x.dtype),
    )


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
) -> Backward:
    """Compute GroupNorm's backward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.group_norm_backward`.  torch's kernels need the
    saved statistics.
    """
    options: dict[str, Any] = {"eps": eps, "activation": activation, "negative_slope": negative_slope}
    options["dropout"] = dropout
    can_compute_call = (
        can_compute(x, num_groups, weight, bias, residual, **options)
        and has_float_tensors(x.shape, dy, dresidual_out)
        and has_float_tensors((x.shape[0], num_groups), mean, rstd)
        and scale is shift is None
    )
    if (
        not can_compute_call
        or mean is None
        or rstd is None
        or mean.dtype != torch.float32
        or rstd.dtype != torch.float32
        or not (
            x.is_contiguous()
            or is_faster_contiguous(x, num_groups, backward=True)
            or not has_distant_mean(mean, rstd)
        )
    ):
        sums: dict[str, Any] = {"residual": residual, "dresidual_out": dresidual_out}
        sums |= {"scale": scale, "shift": shift, "seed": seed, "parameter_gradients": parameter_gradients}
        sums |= {"dy": dy, "x": x, "num_groups": num_groups, "weight": weight, "bias": bias, "mean": mean}
        return fallback_passes.compute_fallback_backward("group_norm", rstd=rstd, **options, **sums)
    if is_faster_contiguous(x, num_groups, backward=True):
        sums = {"residual": residual, "dresidual_out": dresidual_out}
        sums = {name: None if tensor is None else tensor.contiguous() for name, tensor in sums.items()}
        sums |= {"mean": mean, "rstd": rstd, "parameter_gradients": parameter_gradients}
        gradients = group_norm_backward(
            dy.contiguous(), x.contiguous(), num_groups, weight, bias, **options, **sums
        )
        dx = _copy_to_strides(x, gradients.dx)
        return gradients._replace(dx=dx, dresidual=None if residual is None else dx)
    is_wide = activation != "none" or residual is not None or dy.dtype != x.dtype or dresidual_out is not None
    h, gradient = _convert_layout_like(x, x), _convert_layout_like(x, dy)
    if is_wide:
        h, gradient = add_residual(h, _convert_layout_like(x, residual)), gradient.float()
    n, c, positions = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    # torch has no gradient of a bias without a weight, and would need the statistics in a 16-bit x's dtype.
    factor = make_ones(c) if weight is None else to_float32(weight)
    if activation != "none":
        z = torch.native_group_norm(h, factor, to_float32(bias), n, c, positions, num_groups, eps)[0]
        gradient = backpropagate_activation_into_z_(gradient, z, activation, negative_slope)
    wanted = [parameter_gradients and parameter is not None for parameter in (weight, bias)]
    dx, dweight, dbias = _backward_of_torch(
        gradient, h, mean, rstd, factor, n, c, positions, num_groups, [True, *wanted]
    )
    if dresidual_out is not None:
        dx = dx.add_(_convert_layout_like(x, dresidual_out))
    dx = dx.to(x.dtype)
    return Backward(
        dx,
        dweight.to(weight.dtype) if wanted[0] and weight is not None else None,
        dbias.to(bias.dtype) if wanted[1] and bias is not None else None,
        None if residual is None else dx,
    )


def _try_normalise(
    h: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute GroupNorm of h by torch's kernel; return the result, and mean and rstd, float32 [N, num_groups].

    Return None for a channels-last h with a mean far from zero, for which torch's variance is inaccurate.
    """
    n, c = h.shape[:2]
    # With float32 parameters torch's statistics are float32, too.
    factor = make_ones(c) if weight is bias is None and h.dtype != torch.float32 else to_float32(weight)
    z, mean, rstd = torch.native_group_norm(
        h, factor, to_float32(bias), n, c, math.prod(h.shape[2:]), num_groups, eps
    )
    return None if not h.is_contiguous() and has_distant_mean(mean, rstd) else (z, mean, rstd)


def _copy_to_strides(x: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor to new memory with x's strides."""
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _convert_layout_like(x: Tensor, tensor: Any) -> Any:
    """Convert a tensor of x's shape to x's layout; None stays None."""
    return None if tensor is None else convert_to_layout(tensor, not x.is_contiguous())
