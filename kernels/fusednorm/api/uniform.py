"""The passes of `layer_norm`, `rms_norm` and `group_norm` with one common signature.

The library is a module with `<op>_forward` and `<op>_backward` like the launchers; `fusednorm.cpu` and
`fusednorm.reference` are such modules.  Arguments that the pass of an operation does not have are ignored.
Tensors whose strides the launchers do not support are copied.
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fusednorm.arguments.checks import (
    MAX_HEADS,
    Epilogue,
    as_heads,
    check_groups,
    check_weight_offset,
    checked_eps,
    has_common_stride,
    has_heads,
)
from fusednorm.arguments.layouts import in_layout, laid_out
from fusednorm.errors import UnsupportedShapeError
from fusednorm.reference.checks import check_companion, check_float
from fusednorm.results import Backward, Forward

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight, bias, residual, scale and shift."""

_MAX_COLS_OF_HEADS = 8192
"""The longest rows that both passes support if they need two strides."""


def run_forward(
    library: Any,
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
    seed: int | None,
    *,
    stats: bool = False,
) -> Forward:
    """The forward pass of `op`."""
    if _normalises_nothing(op, x):
        settings = num_groups, eps, weight_offset, activation, dropout, seed
        return _forward_of_nothing(op, x, weight, bias, residual, scale, shift, *settings)
    run: Callable[..., Forward] = getattr(library, f"{op}_forward")
    x, residual = copy_unsupported(op, x, residual)
    weight, bias = _contiguous(weight), _contiguous(bias)
    scale, shift = _with_common_stride(scale, shift)
    return run(
        *_leading(op, x, num_groups),
        *_parameters(op, weight, bias),
        eps=eps,
        **_offset(op, weight_offset),
        **_of_samples(op, scale, shift),
        residual=residual,
        activation=activation,
        dropout=dropout,
        seed=seed,
        stats=stats,
    )


def run_backward(
    library: Any,
    op: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    dresidual_out: Tensor | None,
    num_groups: int,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
    seed: int,
    *,
    parameter_gradients: bool = True,
) -> Results:
    """dx, dweight, dbias, dresidual (None if it is dx), dscale and dshift of the backward pass of `op`."""
    if _normalises_nothing(op, x):
        dweight, dbias, dscale, dshift = (
            None if p is None else p.new_zeros(p.shape) for p in (weight, bias, scale, shift)
        )
        dresidual = torch.empty_like(residual) if has_own_gradient(residual, op, x) else None
        return torch.empty_like(x), dweight, dbias, dresidual, dscale, dshift
    run: Callable[..., Backward] = getattr(library, f"{op}_backward")
    x, dy, residual, dresidual_out = copy_unsupported(op, x, dy, residual, dresidual_out)
    weight, bias, mean, rstd = map(_contiguous, (weight, bias, mean, rstd))
    scale, shift = _with_common_stride(scale, shift)
    statistics = {"rstd": rstd} if op == "rms_norm" else {"mean": mean, "rstd": rstd}
    result = run(
        dy,
        *_leading(op, x, num_groups),
        *_parameters(op, weight, bias),
        eps=eps,
        **_offset(op, weight_offset),
        **_of_samples(op, scale, shift),
        residual=residual,
        dresidual_out=dresidual_out,
        activation=activation,
        dropout=dropout,
        seed=seed,
        parameter_gradients=parameter_gradients,
        **statistics,
    )
    dresidual = result.dresidual if has_own_gradient(residual, op, x) else None
    return result.dx, result.dweight, result.dbias, dresidual, result.dscale, result.dshift


def gradients(
    op: str,
    run: Callable[..., Results],
    saved: tuple[Any, ...],
    settings: tuple[Any, ...],
    dy: Tensor | None,
    dresidual_out: Tensor | None,
) -> Results:
    """The derivative of `op`, computed by `run`: its operator, or `run_backward` of a library.

    `saved` is x, weight, bias, residual, scale, shift, mean and rstd of the forward pass; `settings` are its other
    arguments.
    """
    x, weight, bias, residual, scale, shift, mean, rstd = saved
    dy = torch.zeros_like(x) if dy is None else dy
    dsum = None if residual is None else dresidual_out
    dx, dweight, dbias, dresidual, dscale, dshift = run(
        dy, x, weight, bias, mean, rstd, residual, scale, shift, dsum, *settings
    )
    if not has_own_gradient(residual, op, x):
        dresidual = None if residual is None else dx.to(residual.dtype)
    return (
        dx,
        None if weight is None else dweight,
        None if bias is None else dbias,
        dresidual,
        None if scale is None else dscale,
        None if shift is None else dshift,
    )


def _leading(op: str, x: Tensor, num_groups: int) -> tuple[Any, ...]:
    return (x, num_groups) if op == "group_norm" else (x,)


def _parameters(op: str, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (weight,) if op == "rms_norm" else (weight, bias)


def _offset(op: str, weight_offset: float) -> dict[str, float]:
    return {} if op == "group_norm" else {"weight_offset": weight_offset}


def _of_samples(op: str, scale: Tensor | None, shift: Tensor | None) -> dict[str, Tensor | None]:
    return {"scale": scale, "shift": shift} if op == "group_norm" else {}


def has_own_gradient(residual: Tensor | None, op: str, x: Tensor) -> TypeGuard[Tensor]:
    """Whether the residual's gradient is a separate tensor, not dx."""
    return residual is not None and residual.dtype != x.dtype and op != "group_norm"


def copy_unsupported(op: str, x: Tensor, *others: Tensor | None) -> list[Any]:
    """x and tensors of x's shape with strides that all passes support; copies of those with other strides.

    A copy of x [N, C, *spatial] has the memory format that torch suggests for x's strides, as in torch's own
    function; copies of the other tensors have x's layout.
    """
    tensors = (x, *others)
    if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return list(tensors)
    if op != "group_norm":
        if all(tensor is None or _has_uniform_rows(tensor) for tensor in tensors):
            return list(tensors)
        return [t if t is None or _has_contiguous_heads(t) else t.contiguous() for t in tensors]
    if not _is_sample_layout(x):
        x = laid_out(x, suggest_memory_format(x) is not torch.contiguous_format)
    channels_last = not x.is_contiguous()
    return [x, *(t if t is None or _is_sample_layout(t) else laid_out(t, channels_last) for t in others)]


def _normalises_nothing(op: str, x: Tensor) -> bool:
    """Whether each row or group of x is empty, which torch supports and no launcher does."""
    return x.numel() == 0 and 0 in (x.shape[2:] if op == "group_norm" else x.shape[-1:])


def _forward_of_nothing(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
    seed: int | None,
) -> Forward:
    """The forward pass over empty rows or groups, whose arguments are checked as in any other."""
    Epilogue(activation, dropout, seed)
    checked_eps(eps)
    check_float("x", x)
    if op == "group_norm":
        check_groups(x.new_empty((*x.shape[:2], 1)), num_groups)
        of_parameters, of_statistics = x.shape[1:2], torch.Size((x.shape[0], num_groups))
    else:
        check_weight_offset(weight_offset, weight)
        of_parameters, of_statistics = x.shape[-2 if has_heads(weight, bias) else -1 :], x.shape[:-1]
    for name, tensor, shape in (
        ("weight", weight, of_parameters),
        ("bias", bias, of_parameters),
        ("residual", residual, None),
        ("scale", scale, x.shape[:2]),
        ("shift", shift, x.shape[:2]),
    ):
        check_companion(name, tensor, x, shape)
    rstd = x.new_full(of_statistics, math.nan, dtype=torch.promote_types(x.dtype, torch.float32))
    mean = None if op == "rms_norm" else torch.zeros_like(rstd)
    residual_out = None if residual is None else torch.empty_like(x if op == "group_norm" else residual)
    return Forward(torch.empty_like(x), mean, rstd, residual_out)


def _is_sample_layout(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() > 2 and in_layout(x, True))


def _has_uniform_rows(tensor: Tensor) -> bool:
    """Whether [..., cols] has rows of contiguous elements, one constant stride apart."""
    return tensor.is_contiguous() or (tensor.stride(-1) == 1 and has_common_stride(tensor))


def _has_contiguous_heads(tensor: Tensor) -> bool:
    """Whether [..., heads, cols] has tokens of contiguous heads, one constant stride apart."""
    if tensor.is_contiguous():
        return True
    cols = tensor.shape[-1]
    if tensor.dim() < 3 or tensor.stride()[-2:] != (cols, 1):
        return False
    if cols > _MAX_COLS_OF_HEADS or tensor.shape[-2] > MAX_HEADS:
        return False
    try:
        as_heads("x", tensor)
    except UnsupportedShapeError:
        return False
    return True


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _with_common_stride(scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """scale and shift [N, C] with contiguous channels and one stride between samples."""
    strides = [tensor.stride() for tensor in (scale, shift) if tensor is not None]
    if all(stride == strides[0] and stride[-1:] == (1,) for stride in strides):
        return scale, shift
    return _contiguous(scale), _contiguous(shift)
