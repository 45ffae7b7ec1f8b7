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
from fusednorm.api.uniform import gradients, has_own_gradient, run_backward, run_backward_operator, run_forward
from fusednorm.arguments.inputs import OPERATIONS, BackwardInputs, NormInputs, write_tensor_schema
from fusednorm.arguments.options import OPTIONS_SCHEMA, NormOptions
from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float
from fusednorm.results import Backward
from fusednorm.tensors.layouts import laid_out

_FORWARD_SCHEMA = (
    f"({write_tensor_schema(NormInputs, 'x')}, {OPTIONS_SCHEMA}) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor residual_out)"
)
_BACKWARD_SCHEMA = (
    f"({write_tensor_schema(BackwardInputs, 'dy', 'x', 'rstd')}, {OPTIONS_SCHEMA}) "
    f"-> ({', '.join(f'Tensor d{name}' for name in NormInputs._fields)})"
)


def _parse_forward(op: str, arguments: tuple[Any, ...]) -> tuple[NormInputs, NormOptions]:
    """The arguments of a forward operator."""
    count = len(NormInputs._fields)
    return NormInputs(*arguments[:count]), NormOptions(op, *arguments[count:])


def _parse_backward(op: str, arguments: tuple[Any, ...]) -> tuple[BackwardInputs, NormOptions]:
    """The arguments of a backward operator."""
    count = len(BackwardInputs._fields)
    return BackwardInputs.from_operator(arguments[:count]), NormOptions(op, *arguments[count:])


def _check_dtypes(inputs: NormInputs | BackwardInputs) -> None:
    """Raises KernelInputError for a dtype that no device supports: in a trace no pass runs that would refuse it."""
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is not None:
            check_float(name, tensor)


def _absent(x: Tensor) -> Tensor:
    """The placeholder for an unwanted result of an operator, which cannot return None."""
    return x.new_empty(0)


def _list_results(op: str, inputs: BackwardInputs, result: Backward) -> tuple[Tensor, ...]:
    """The results of a backward operator, in tensors of their own."""
    if not has_own_gradient(inputs.residual, op, inputs.x):
        result = result._replace(dresidual=None)
    return tuple(_absent(inputs.x) if tensor is None else tensor for tensor in result)


def _define(library: torch.library.Library, op: str) -> None:
    """Define `op` and its backward with their kernels, fakes and derivatives."""

    def forward(*arguments: Any, library: Any = None) -> tuple[Tensor, ...]:
        inputs, options = _parse_forward(op, arguments)
        result = run_forward(library or autograd.library_of(op, inputs.x), options, inputs, stats=True)
        assert result.rstd is not None
        mean, residual_out = (_absent(inputs.x) if t is None else t for t in (result.mean, result.residual_out))
        return result.y, mean, result.rstd, residual_out

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = _parse_backward(op, arguments)
        return _list_results(op, inputs, run_backward(autograd.library_of(op, inputs.x), options, inputs))

    def plain_backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = _parse_backward(op, arguments)
        # Saved statistics are constants; statistics computed here are functions of x.
        return _list_results(op, inputs, run_backward(reference, options, inputs._replace(mean=None, rstd=None)))

    def fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, options = _parse_forward(op, arguments)
        _check_dtypes(inputs)
        x, residual = inputs.x, inputs.residual
        statistics_shape = (x.shape[0], options.num_groups) if op == "group_norm" else x.shape[:-1]
        statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty(statistics_shape, dtype=statistics_dtype)
        mean = _absent(x) if op == "rms_norm" else torch.empty_like(rstd)
        residual_out = _absent(x) if residual is None else _like(op, x if op == "group_norm" else residual)
        return _like(op, x), mean, rstd, residual_out

    def fake_backward(*arguments: Any) -> tuple[Any, ...]:
        inputs, _ = _parse_backward(op, arguments)
        _check_dtypes(inputs)
        x, residual = inputs.x, inputs.residual
        made = [_absent(x) if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs.forward]
        dresidual = _like(op, residual) if has_own_gradient(residual, op, x) else _absent(x)
        return tuple(NormInputs._make(made)._replace(x=_like(op, x), residual=dresidual))

    def remember(ctx: Any, arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        inputs, ctx.options = _parse_forward(op, arguments)
        _, mean, rstd, _ = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, None if op == "rms_norm" else mean, rstd)

    def differentiate(
        ctx: Any, dy: Tensor | None, dmean: None, drstd: None, dresidual_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        found = gradients(partial(run_backward_operator, ctx.options), ctx.saved_tensors, dy, dresidual_out)
        return *found, *(None for _ in ctx.options.settings)

    def remember_backward(ctx: Any, arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        inputs, ctx.options = _parse_backward(op, arguments)
        for name, statistic in (("mean", inputs.mean), ("rstd", inputs.rstd)):
            if statistic is not None and statistic.requires_grad:
                raise KernelInputError(f"{name} must not require a gradient: it is taken as a function of x")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs._replace(mean=None, rstd=None))

    def differentiate_backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = *BackwardInputs(*ctx.saved_tensors).list_operator_arguments(), *ctx.options.settings
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
