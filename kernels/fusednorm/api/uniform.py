"""The passes of `layer_norm`, `rms_norm` and `group_norm` with one common signature.

The library is a module with `<op>_forward` and `<op>_backward` like the launchers; `fusednorm.cpu` and
`fusednorm.reference` are such modules.  Arguments that the pass of an operation does not have are ignored.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fusednorm.arguments.layouts import in_layout, laid_out
from fusednorm.results import Backward, Forward

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight, bias, residual, scale and shift."""


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
    run: Callable[..., Forward] = getattr(library, f"{op}_forward")
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
    run: Callable[..., Backward] = getattr(library, f"{op}_backward")
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
    dy = torch.zeros_like(x) if dy is None else _laid_out_as(op, x, dy)
    dsum = None if dresidual_out is None or residual is None else _laid_out_as(op, x, dresidual_out)
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


def _laid_out_as(op: str, x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in a layout that kernels support; an expanded or permuted one from autograd is copied."""
    if op == "group_norm":
        walkable = in_layout(gradient, False) or in_layout(gradient, True)
        return gradient if walkable else laid_out(gradient, not x.is_contiguous())
    return gradient.contiguous()
