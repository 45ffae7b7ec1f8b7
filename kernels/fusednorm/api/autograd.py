"""Differentiable functions: `layer_norm`, `rms_norm`, `group_norm`, and the same after a residual addition.

If torch traces, transforms or observes the call, it sees the operators of `operators`, which the package
registers.  Otherwise these operators would cost the host several times as much as the passes, so the call goes
directly to its pass, through a `torch.autograd.Function` if it is differentiated.  A plain norm of CPU tensors is
torch's own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fusednorm import cpu
from fusednorm.api.observers import is_differentiated, is_observed
from fusednorm.api.sharding import register_shardings
from fusednorm.api.uniform import gradients, run_backward, run_forward
from fusednorm.cpu import plain
from fusednorm.devices.device import HAS_TRITON, INTERPRETED, needs_triton
from fusednorm.errors import KernelInputError
from fusednorm.results import Forward

if HAS_TRITON:
    from fusednorm.api import group_norm as group_norm_passes
    from fusednorm.api import layer_norm as layer_norm_passes
    from fusednorm.launch.native import loaded
    from fusednorm.launch.prepared import undisturbed
    from fusednorm.launch.replay import MAX_KINDS, in_use, policy, use_when_there


class Added(NamedTuple):
    """Result of a norm after a residual addition.

    Attributes:
        y: the normalised sum.
        residual_out: x + residual, in the residual's dtype; for a group norm in x's dtype.
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
    is_repeatable = HAS_TRITON and not (dropout or seed is not None or is_compiling())
    extension = in_use() if is_repeatable else None
    if extension is not None and undisturbed():
        known = op, num_groups, eps, weight_offset, activation
        made: tuple[Tensor, Any] | None = extension.differentiable(
            known, policy(), x, residual, weight, bias, scale, shift
        )
        if made is not None:
            return made
        _define(extension, *known)
    if x.is_nested:
        options = eps, weight_offset, activation, dropout, seed
        return _apply_to_nested(op, x, weight, bias, residual, num_groups, *options)
    observed = is_observed(x, weight, bias, residual, scale, shift)
    differentiated = not observed and is_differentiated(x, weight, bias, residual, scale, shift)
    if x.is_cpu and not observed and activation == "none" and residual is scale is shift is None and x.numel():
        has_options = weight_offset != 0.0 or dropout != 0.0 or library_of(op, x) is not cpu
        norm = None if has_options else plain.norm(op, x, weight, bias, num_groups, eps, differentiated)
        if norm is not None:
            return norm, None
    settings = num_groups, eps, weight_offset, activation, dropout, seed or 0
    if not (observed or differentiated):
        again = _again(op, (x, weight, bias, residual, scale, shift), settings, stats=False)
        if again is not None:
            return again.y, again.residual_out
    if dropout and seed is None:
        settings = *settings[:-1], int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    if observed or not (x.is_cuda or x.is_cpu):
        register_shardings()
        run = getattr(torch.ops.fusednorm, op)
        y, _, _, residual_out = run(x, weight, bias, residual, scale, shift, *settings)
        return y, residual_out
    if differentiated:
        y, residual_out = _apply_norm(x, weight, bias, residual, scale, shift, op, settings)
        return y, residual_out
    result = run_forward(library_of(op, x), op, x, weight, bias, residual, scale, shift, *settings)
    return result.y, result.residual_out


def _apply_to_nested(
    op: str, x: Any, weight: Tensor | None, bias: Tensor | None, residual: Any, *options: Any
) -> tuple[Tensor, Any]:
    """A call with a nested tensor, whose rows are those of one tensor with all of its values.

    Raises:
        KernelInputError: rows are not those of its values, or residual has another shape.
    """
    if op == "group_norm" or x.layout is not torch.jagged or x._ragged_idx == x.dim() - 1:
        raise KernelInputError(
            "a nested x must have the layout torch.jagged, rows of one length, and layer_norm or rms_norm, "
            f"got {op} of a nested tensor with layout {x.layout}: call the function with each tensor of x.unbind()"
        )
    if residual is not None and not (residual.is_nested and residual.shape == x.shape):
        raise KernelInputError("residual must be a nested tensor with x's offsets, as x is nested, got another one")

    def nested(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), jagged_dim=x._ragged_idx)

    if residual is None:
        return nested(_apply(op, x.values(), weight, bias, None, *options)[0]), None
    y, residual_out = _apply(op, x.values(), weight, bias, residual.values(), *options)
    return nested(y), nested(residual_out)


_Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""x, weight, bias, residual, scale and shift."""


def library_of(op: str, x: Tensor) -> Any:
    """The module that computes `op` on x's device.

    Raises:
        ModuleNotFoundError: the kernels would compute it, but Triton is not installed.
    """
    if x.device.type == "cpu":
        return cpu
    if not HAS_TRITON:
        raise needs_triton(f"{op} of a tensor on {x.device}")
    return group_norm_passes if op == "group_norm" else layer_norm_passes


def _again(op: str, inputs: _Inputs, settings: tuple[Any, ...], stats: bool) -> Forward | None:
    """The result of a call of a known kind, else None: see `launch.replay`."""
    *known, dropout, seed = settings
    if dropout or seed or not HAS_TRITON:
        return None
    x, weight, bias, residual, scale, shift = inputs
    if x.is_cpu and not INTERPRETED:
        return None
    options = _forward_options(op, *known, stats=stats)
    if op == "group_norm":
        return group_norm_passes.FORWARD.again((x, residual, weight, bias, scale, shift), options)
    return layer_norm_passes.FORWARD.again((x, residual, weight, bias), options)


def _forward_options(
    op: str, num_groups: int, eps: float, weight_offset: float, activation: str, *, stats: bool
) -> tuple[Any, ...]:
    """Options of the forward pass of a call, as in the key of the pass."""
    if op == "group_norm":
        return num_groups, eps, activation, None, stats
    return op == "rms_norm", eps, weight_offset, activation, None, stats


def _define(extension: Any, op: str, *known: Any) -> None:
    """Define a differentiable call in the host extension by its passes and options."""
    num_groups, eps, weight_offset, activation = known
    groups = op == "group_norm"
    passes = group_norm_passes if groups else layer_norm_passes
    back = (num_groups, eps, activation) if groups else (op == "rms_norm", eps, weight_offset, activation)
    forward = (_forward_options(op, *known, stats=stats) for stats in (True, False))
    backward = ((*back, parameter_gradients) for parameter_gradients in (True, False))
    try:
        extension.define_differentiable(
            (op, *known), passes.FORWARD.number, *forward, passes.BACKWARD.number, *backward, groups
        )
    except TypeError:  # An option without a hash, which the checks refuse.
        return


def _backward(
    known: tuple[Any, ...],
    saved: tuple[Any, ...],
    dy: Tensor | None,
    dresidual_out: Tensor | None,
    parameter_gradients: bool,
) -> tuple[Tensor | None, ...]:
    """The backward pass of a call that the host extension made, if the extension does not know that pass.

    `saved` and the gradients are in the order x, residual, weight, bias, scale, shift; `saved` also has mean and
    rstd.
    """
    op, *settings = known
    x, residual, weight, bias, *others = saved
    saved = x, weight, bias, residual, *others
    run = _backward_of(op, parameter_gradients, dy, dresidual_out, *saved)
    found = gradients(op, run, saved, (*settings, 0.0, 0), dy, dresidual_out)
    dx, dweight, dbias, dresidual, dscale, dshift = found
    return dx, dresidual, dweight, dbias, dscale, dshift


def _backward_of(
    op: str,
    parameter_gradients: bool,
    dy: Tensor | None,
    dresidual_out: Tensor | None,
    x: Tensor,
    *saved: Tensor | None,
) -> Callable[..., Any]:
    """The function that computes the backward pass over these tensors."""
    if is_observed(dy, dresidual_out, x, *saved) or torch.is_grad_enabled():
        run: Callable[..., Any] = getattr(torch.ops.fusednorm, f"{op}_backward")
        return run
    return partial(run_backward, library_of(op, x), op, parameter_gradients=parameter_gradients)


class _Norm(torch.autograd.Function):
    """The derivative of the operators without torch's dispatcher."""

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
            library = library_of(op, x)
            result = run_forward(library, op, x, weight, bias, residual, scale, shift, *settings, stats=True)
        ctx.op, ctx.settings = op, settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, residual, scale, shift, result.mean, result.rstd)
        return result.y, result.residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None) -> tuple[Any, ...]:
        saved, op = ctx.saved_tensors, ctx.op
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        run = _backward_of(op, of_weight or of_bias, dy, dresidual_out, *saved)
        return *gradients(op, run, saved, ctx.settings, dy, dresidual_out), None, None


# `apply` without its handling of functorch, which is never active here.
_apply_norm: Callable[..., Any] = super(torch.autograd.Function, _Norm).apply


if HAS_TRITON:
    use_when_there(partial(loaded, _backward, MAX_KINDS))
