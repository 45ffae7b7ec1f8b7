"""Differentiable functions: `layer_norm`, `rms_norm`, `group_norm`, and the same after a residual addition.

Whoever traces, transforms or watches torch's calls sees the operators of `operators`.  Where nobody does, they
would cost the host several times what the passes do: a call goes to its pass at once, through a
`torch.autograd.Function` where it is differentiated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from fusednorm.api import group_norm as group_norm_passes
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.api import operators
from fusednorm.results import Forward


class Added(NamedTuple):
    """Result of a norm after a residual addition.

    Attributes:
        y: the normalised sum.
        residual_out: x + residual, in the residual's dtype; after a group norm, in x's.
    """

    y: Tensor
    residual_out: Tensor


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`layer_norm_forward`'s y, differentiable in x, weight and bias."""
    return _apply("layer_norm", x, weight, bias, None, 0, eps, weight_offset, activation, dropout, seed)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`rms_norm_forward`'s y, differentiable in x and weight."""
    return _apply("rms_norm", x, weight, None, None, 0, eps, weight_offset, activation, dropout, seed)[0]


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`group_norm_forward`'s y, differentiable in x, weight, bias, scale and shift."""
    settings = num_groups, eps, 0.0, activation, dropout, seed
    return _apply("group_norm", x, weight, bias, None, *settings, scale, shift)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`layer_norm` of x + residual, with the sum; differentiable in all four tensors."""
    return Added(*_apply("layer_norm", x, weight, bias, residual, 0, eps, weight_offset, activation, dropout, seed))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`rms_norm` of x + residual, with the sum; differentiable in all three tensors."""
    return Added(*_apply("rms_norm", x, weight, None, residual, 0, eps, weight_offset, activation, dropout, seed))


def add_group_norm(
    x: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`group_norm` of x + residual, with the sum; differentiable in all six tensors."""
    settings = num_groups, eps, 0.0, activation, dropout, seed
    return Added(*_apply("group_norm", x, weight, bias, residual, *settings, scale, shift))


def _apply(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_groups: int,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
    seed: int | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Any]:
    observed = _is_observed(x, weight, bias, residual, scale, shift)
    differentiated = not observed and _is_differentiated(x, weight, bias, residual, scale, shift)
    settings = num_groups, eps, weight_offset, activation, dropout, seed or 0
    if not (observed or differentiated):
        again = _again(op, (x, weight, bias, residual, scale, shift), settings, stats=False)
        if again is not None:
            return again.y, again.residual_out
    if dropout and seed is None:
        settings = *settings[:-1], int(torch.randint(2**62, (), dtype=torch.int64))
    if observed or not (x.is_cuda or x.is_cpu):
        run = getattr(torch.ops.fusednorm, op)
        y, _, _, residual_out = run(x, weight, bias, residual, scale, shift, *settings)
        return y, residual_out
    if differentiated:
        y, residual_out = _apply_norm(x, weight, bias, residual, scale, shift, op, settings)
        return y, residual_out
    result = operators.run_forward(op, x, weight, bias, residual, scale, shift, *settings)
    return result.y, result.residual_out


_Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x, weight, bias, residual, scale and shift."""


def _again(op: str, inputs: _Inputs, settings: tuple[Any, ...], stats: bool) -> Forward | None:
    """The result of a call with nothing new about it, or None: see `launch.replay`."""
    num_groups, eps, weight_offset, activation, dropout, seed = settings
    if dropout or seed:
        return None
    if op == "group_norm":
        return group_norm_passes.FORWARD.again(inputs, (num_groups, eps, activation, None, stats))
    x, weight, bias, residual, _, _ = inputs
    options = op == "rms_norm", eps, weight_offset, activation, None, stats
    return layer_norm_passes.FORWARD.again((x, residual, weight, bias), options)


class _Norm(torch.autograd.Function):
    """The derivative of the operators, without their way through torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        op: str,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor | None]:
        result = _again(op, (x, weight, bias, residual, scale, shift), settings, stats=True)
        if result is None:
            result = operators.run_forward(op, x, weight, bias, residual, scale, shift, *settings, stats=True)
        ctx.op, ctx.settings = op, settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, residual, scale, shift, result.mean, result.rstd)
        return result.y, result.residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None) -> tuple[Any, ...]:
        saved, op = ctx.saved_tensors, ctx.op
        if _is_observed(dy, dresidual_out, *saved) or torch.is_grad_enabled():
            run = getattr(torch.ops.fusednorm, f"{op}_backward")
        else:
            run = partial(operators.run_backward, op)
        return *operators.gradients(op, run, saved, ctx.settings, dy, dresidual_out), None, None


# `apply` less its care for functorch, of which there is none where this is called.
_apply_norm: Callable[..., Any] = super(torch.autograd.Function, _Norm).apply

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def _is_observed(*tensors: Tensor | None) -> bool:
    """Whether somebody traces, transforms or watches the call, or a tensor is of a kind that does so itself."""
    # First: while Dynamo traces, the others are not for it to see.
    if is_compiling() or _dispatch_modes() or _function_modes() or _functorch_transform() or _tracing_state():
        return True
    # Tangents would be lost on the way around the dispatcher.
    if forward_ad._current_level >= 0:
        return True
    for tensor in tensors:
        if tensor is None:
            continue
        # What is lazily negated is made good on the way through the dispatcher.
        if (type(tensor) is not Tensor and type(tensor) is not Parameter) or tensor.is_neg():
            return True
    return False


def _is_differentiated(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
