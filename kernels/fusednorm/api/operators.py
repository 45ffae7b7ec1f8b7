"""`torch.library` operators with fake implementations and derivatives, for torch.compile, export and other tracers.

`fusednorm::<op>` and `fusednorm::<op>_backward` for `layer_norm`, `rms_norm` and `group_norm` are single nodes in
a traced graph.  CUDA tensors are computed by the kernels, CPU tensors (including float64) by `fusednorm.cpu`, as
in `autograd` without a tracer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_or_false, suggest_memory_format

from fusednorm import reference
from fusednorm.api import autograd
from fusednorm.api.derivatives import derivative_of_plain, register_derivatives
from fusednorm.api.uniform import gradients, has_own_gradient, run_backward, run_forward
from fusednorm.arguments.layouts import laid_out
from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float

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


def _check_dtypes(**tensors: Tensor | None) -> None:
    """Raises KernelInputError for a dtype that no device supports: in a trace no pass runs that would refuse it."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_float(name, tensor)


def _absent(x: Tensor) -> Tensor:
    """The placeholder for an unwanted result of an operator, which cannot return None."""
    return x.new_empty(0)


def _define(library: torch.library.Library, op: str) -> None:
    """Define `op` and its backward with their kernels, fakes and derivatives."""

    def forward(x: Tensor, *arguments: Any, library: Any = None) -> tuple[Tensor, ...]:
        result = run_forward(library or autograd.library_of(op, x), op, x, *arguments, stats=True)
        assert result.rstd is not None
        mean, residual_out = (_absent(x) if t is None else t for t in (result.mean, result.residual_out))
        return result.y, mean, result.rstd, residual_out

    def backward(dy: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(
            _absent(x) if t is None else t for t in run_backward(autograd.library_of(op, x), op, dy, x, *arguments)
        )

    def plain_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor | None,
        *arguments: Any,
    ) -> tuple[Tensor, ...]:
        # Saved statistics are constants; statistics computed here are functions of x.
        results = run_backward(reference, op, dy, x, weight, bias, None, None, *arguments)
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
        dresidual = _like(op, residual) if has_own_gradient(residual, op, x) else _absent(x)
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
        # Without the first argument, which is the dispatcher's.
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
    """A result of x's shape, laid out as the passes return it."""
    if op != "group_norm":
        return x.new_empty(x.shape)
    # As `copy_unsupported` chooses, but without a condition on sizes that are unknown before the call.
    layouts = (x, x.permute(0, *range(2, x.dim()), 1)) if x.dim() > 2 else (x,)
    if any(map(is_contiguous_or_false, layouts)):
        return torch.empty_like(x)
    return laid_out(x, suggest_memory_format(x) is not torch.contiguous_format)


_LIBRARY = torch.library.Library("fusednorm", "DEF")


def register() -> None:
    """Register the operators with torch, once in a process."""
    for op in OPERATIONS:
        _define(_LIBRARY, op)
