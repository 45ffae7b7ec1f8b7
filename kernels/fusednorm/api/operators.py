"""`torch.library` operators with fakes and derivatives: what torch.compile, export and others who trace torch see.

`fusednorm::<op>` and `fusednorm::<op>_backward` for `layer_norm`, `rms_norm` and `group_norm` stay whole in a
traced graph.  CUDA tensors go to the kernels, CPU tensors to `fusednorm.cpu`, float64 included; so they do in
`run_forward` and `run_backward`, which the operators wrap and `autograd` calls where nobody watches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fusednorm import cpu, reference
from fusednorm.api.derivatives import derivative_of_plain, register_derivatives
from fusednorm.device import HAS_TRITON, needs_triton
from fusednorm.errors import KernelInputError
from fusednorm.layouts import in_layout, laid_out
from fusednorm.reference.checks import check_float
from fusednorm.results import Backward, Forward

if HAS_TRITON:
    from fusednorm.api import group_norm as group_norm_passes
    from fusednorm.api import layer_norm as layer_norm_passes

OPERATIONS = ("layer_norm", "rms_norm", "group_norm")

_FORWARD_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, int num_groups, "
    "float eps, float weight_offset, str activation, float dropout, int seed) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor residual_out)"
)
_BACKWARD_SCHEMA = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor? residual, "
    "Tensor? scale, Tensor? shift, Tensor? dresidual_out, int num_groups, float eps, float weight_offset, "
    "str activation, float dropout, int seed) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dscale, Tensor dshift)"
)


Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight, bias, residual, scale and shift."""


def run_forward(
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
    library: Any = None,
) -> Forward:
    """The forward pass of `op` by `library`, or by what is for x's device.

    What the pass does not take of the arguments is ignored.
    """
    run: Callable[..., Forward] = getattr(library or _library(op, x), f"{op}_forward")
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
    library: Any = None,
) -> Results:
    """dx, dweight, dbias, dscale and dshift of the backward pass of `op`, and dresidual unless that is dx.

    By `library`, or by what is for x's device.
    """
    run: Callable[..., Backward] = getattr(library or _library(op, x), f"{op}_backward")
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
        **statistics,
    )
    dresidual = result.dresidual if _has_own_gradient(residual, op, x) else None
    return result.dx, result.dweight, result.dbias, dresidual, result.dscale, result.dshift


def gradients(
    op: str,
    run: Callable[..., Results],
    saved: tuple[Any, ...],
    settings: tuple[Any, ...],
    dy: Tensor | None,
    dresidual_out: Tensor | None,
) -> Results:
    """The derivative of `op` by `run`, its operator or `run_backward`.

    `saved` is x, weight, bias, residual, scale, shift, mean and rstd of the forward pass, `settings` its arguments
    after those.
    """
    x, weight, bias, residual, scale, shift, mean, rstd = saved
    dy = torch.zeros_like(x) if dy is None else _laid_out_as(op, x, dy)
    dsum = None if dresidual_out is None or residual is None else _laid_out_as(op, x, dresidual_out)
    dx, dweight, dbias, dresidual, dscale, dshift = run(
        dy, x, weight, bias, mean, rstd, residual, scale, shift, dsum, *settings
    )
    if not _has_own_gradient(residual, op, x):
        dresidual = None if residual is None else dx.to(residual.dtype)
    return (
        dx,
        None if weight is None else dweight,
        None if bias is None else dbias,
        dresidual,
        None if scale is None else dscale,
        None if shift is None else dshift,
    )


def _library(op: str, x: Tensor) -> Any:
    """The module that computes `op` where x is.

    Raises:
        ModuleNotFoundError: that would be kernels, and Triton is not installed.
    """
    if x.device.type == "cpu":
        return cpu
    if not HAS_TRITON:
        raise needs_triton(f"{op} of a tensor on {x.device}")
    return group_norm_passes if op == "group_norm" else layer_norm_passes


def _leading(op: str, x: Tensor, num_groups: int) -> tuple[Any, ...]:
    return (x, num_groups) if op == "group_norm" else (x,)


def _parameters(op: str, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (weight,) if op == "rms_norm" else (weight, bias)


def _offset(op: str, weight_offset: float) -> dict[str, float]:
    return {} if op == "group_norm" else {"weight_offset": weight_offset}


def _of_samples(op: str, scale: Tensor | None, shift: Tensor | None) -> dict[str, Tensor | None]:
    return {"scale": scale, "shift": shift} if op == "group_norm" else {}


def _has_own_gradient(residual: Tensor | None, op: str, x: Tensor) -> TypeGuard[Tensor]:
    """Whether the residual's gradient is a tensor of its own, and not dx."""
    return residual is not None and residual.dtype != x.dtype and op != "group_norm"


def _check_dtypes(**tensors: Tensor | None) -> None:
    """Raises KernelInputError for a tensor that no device takes: a trace has no pass to refuse it."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_float(name, tensor)


def _absent(x: Tensor) -> Tensor:
    """What an operator returns for a result that was not asked for: it cannot return None."""
    return x.new_empty(0)


def _define(library: torch.library.Library, op: str) -> None:
    """Define `op` and its backward with their kernels, fakes and derivatives."""

    def forward(x: Tensor, *arguments: Any, library: Any = None) -> tuple[Tensor, ...]:
        result = run_forward(op, x, *arguments, stats=True, library=library)
        assert result.rstd is not None
        mean, residual_out = (_absent(x) if t is None else t for t in (result.mean, result.residual_out))
        return result.y, mean, result.rstd, residual_out

    def backward(dy: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_absent(x) if t is None else t for t in run_backward(op, dy, x, *arguments))

    def plain_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor | None,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        # Statistics that came are numbers; those that are taken here are functions of x.
        results = run_backward(op, dy, x, weight, bias, None, None, *arguments, library=reference)
        return tuple(_absent(x) if t is None else t for t in results)

    def fake_forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        num_groups: int,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _check_dtypes(x=x, weight=weight, bias=bias, residual=residual, scale=scale, shift=shift)
        statistics_shape = (x.shape[0], num_groups) if op == "group_norm" else x.shape[:-1]
        statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty(statistics_shape, dtype=statistics_dtype)
        mean = _absent(x) if op == "rms_norm" else torch.empty_like(rstd)
        residual_out = _absent(x) if residual is None else _like(op, x if op == "group_norm" else residual)
        return _like(op, x), mean, rstd, residual_out

    def fake_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        dresidual_out: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor, ...]:
        _check_dtypes(dy=dy, x=x, weight=weight, bias=bias, mean=mean, rstd=rstd)
        _check_dtypes(residual=residual, scale=scale, shift=shift, dresidual_out=dresidual_out)
        dweight, dbias, dscale, dshift = (
            _absent(x) if p is None else p.new_empty(p.shape) for p in (weight, bias, scale, shift)
        )
        dresidual = _like(op, residual) if _has_own_gradient(residual, op, x) else _absent(x)
        return _like(op, x), dweight, dbias, dresidual, dscale, dshift

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, scale, shift, *ctx.settings = inputs
        _, mean, rstd, _ = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, residual, scale, shift, None if op == "rms_norm" else mean, rstd)

    def differentiate(
        ctx: Any, dy: Tensor | None, dmean: None, drstd: None, dresidual_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        settings = tuple(ctx.settings)
        run = getattr(torch.ops.fusednorm, f"{op}_backward")
        of_tensors = gradients(op, run, ctx.saved_tensors, settings, dy, dresidual_out)
        return *of_tensors, *(None for _ in settings)

    def remember_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        dy, x, weight, bias, mean, rstd, residual, scale, shift, dresidual_out, *ctx.settings = inputs
        for name, statistic in (("mean", mean), ("rstd", rstd)):
            if statistic is not None and statistic.requires_grad:
                raise KernelInputError(f"{name} must not require a gradient: it is taken as a function of x")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dy, x, weight, bias, residual, scale, shift, dresidual_out)

    def differentiate_backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, x, weight, bias, residual, scale, shift, dresidual_out = ctx.saved_tensors
        arguments = dy, x, weight, bias, None, None, residual, scale, shift, dresidual_out, *ctx.settings
        # After the first, which is the dispatcher's.
        return derivative_of_plain(plain_backward, arguments, ctx.needs_input_grad[1:], of_results)

    for name, schema, kernel, fake in (
        (op, _FORWARD_SCHEMA, forward, fake_forward),
        (f"{op}_backward", _BACKWARD_SCHEMA, backward, fake_backward),
    ):
        library.define(name + schema)
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"fusednorm::{name}", fake, lib=library)
    plain_forward = partial(forward, library=reference)
    register_derivatives(library, op, plain_forward, remember, differentiate)
    register_derivatives(library, f"{op}_backward", plain_backward, remember_backward, differentiate_backward)


def _like(op: str, x: Tensor) -> Tensor:
    return torch.empty_like(x) if op == "group_norm" else x.new_empty(x.shape)


def _laid_out_as(op: str, x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient as the kernels take it; autograd may hand over an expanded or permuted one, which costs a copy."""
    if op == "group_norm":
        walkable = in_layout(gradient, False) or in_layout(gradient, True)
        return gradient if walkable else laid_out(gradient, not x.is_contiguous())
    return gradient.contiguous()


_LIBRARY = torch.library.Library("fusednorm", "DEF")
for _op in OPERATIONS:
    _define(_LIBRARY, _op)
