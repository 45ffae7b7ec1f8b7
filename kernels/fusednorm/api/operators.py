"""Implementations, fakes and derivatives of the operators, for torch.compile, export and other tracers.

`fusednorm::<op>` and `fusednorm::<op>_backward` for `layer_norm`, `rms_norm` and `group_norm` are single nodes in
a traced graph.  CUDA tensors are computed by the kernels, CPU tensors (including float64) by `fusednorm.cpu`, as
in `autograd` without a tracer.

Reverse mode has a formula for each operator.  Forward mode, `torch.vmap` and derivatives of backward passes are
computed by torch from an equivalent operation in plain torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._prims_common import is_contiguous_or_false
from torch.autograd import forward_ad

from fusednorm import reference
from fusednorm.api import autograd
from fusednorm.api.uniform_passes import (
    compute_input_gradients,
    run_backward,
    run_backward_operator,
    run_forward,
)
from fusednorm.arguments.inputs import OPERATIONS, BackwardInputs, NormInputs, has_own_gradient
from fusednorm.arguments.operator_arguments import list_operator_arguments, parse_operator_arguments
from fusednorm.arguments.options import NormOptions
from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float
from fusednorm.results import Backward
from fusednorm.tensors.layouts import convert_to_layout, has_channel_rows, suggests_channels_last

Results = tuple[Tensor, ...]
Plain = Callable[..., Results]
"""An operator in plain torch, with the operator's arguments and results."""

Setup = Callable[[Any, tuple[Any, ...], Results], None]
"""A function that saves the arguments and results needed by the derivative in a context."""

Derivative = Callable[..., tuple[Tensor | None, ...]]
"""A function from the context and the gradients of the results to the gradients of the arguments."""

_TRANSFORMED = torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
_dispatch_modes = torch._C._len_torch_dispatch_stack


def make_differentiable(name: str, plain: Plain, setup: Setup, derivative: Derivative) -> Callable[..., Results]:
    """Make an operator's implementation for autograd: differentiable in reverse and forward mode.

    Unlike with `torch.library.register_autograd`, the operator works in (nested) transforms of `torch.func`, and
    tangents are not lost.

    Args:
        name: the operator's name in the namespace `fusednorm`.
        plain: computes the operator in plain torch; forward mode uses this function.
        setup: saves the tensors that `derivative` needs in a context.
        derivative: computes the gradients of the arguments from the context and the gradients of the
            results.
    """
    operator = getattr(torch.ops.fusednorm, name).default
    below_autograd = torch._C._after_autograd_keyset

    def redispatch_below_autograd(keyset: torch._C.DispatchKeySet, arguments: tuple[Any, ...]) -> Results:
        with torch._C._AutoDispatchBelowAutograd():
            results: Results = operator.redispatch(keyset & below_autograd, *arguments)
        return results

    class OperatorFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *arguments: Any) -> Results:
            # A Function's forward disables both modes, but there may be transforms around this one.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                results = redispatch_below_autograd(keyset, arguments)
            setup(ctx, arguments, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return None, *derivative(ctx, *gradients)

    # `Node.apply` without its refusal of transforms: the dispatcher's kernel handles one transform at a time.
    apply: Callable[..., Results] = super(torch.autograd.Function, OperatorFunction).apply

    def dispatch_forward(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Results:
        may_have_tangents = forward_ad._current_level >= 0 or keyset.has(_TRANSFORMED) or _dispatch_modes()
        if may_have_tangents and any(map(has_tangent, arguments)):
            return plain(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            with enable_single_level_autograd_function():
                return apply(keyset, *arguments)
        return redispatch_below_autograd(keyset, arguments)

    return dispatch_forward


def has_tangent(argument: Any) -> bool:
    """Return whether an argument has a forward-mode tangent."""
    # Level 0: torch has no other level yet.
    return isinstance(argument, Tensor) and torch._VF._unpack_dual(argument, level=0)[1] is not None


def differentiate_plain_operator(
    plain: Plain, arguments: tuple[Any, ...], needed: tuple[bool, ...], gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a function by operations of torch that can be differentiated again.

    Args:
        plain: the function to differentiate.
        arguments: its arguments.
        needed: for each argument, whether its gradient is wanted.
        gradients: gradients of its results; None is zero.
    """
    places = [place for place, wanted in enumerate(needed) if wanted]
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]
    found: list[Tensor | None] = [None] * len(arguments)
    if not (places and used):
        return tuple(found)

    def call_with_needed(*tensors: Tensor) -> Results:
        given = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        results = plain(*given)
        return tuple(results[place] for place in used)

    pull_back: Callable[[Any], Any]
    _, pull_back, *_ = torch.func.vjp(call_with_needed, *(arguments[place] for place in places))
    pulled = pull_back(tuple(gradients[place] for place in used))
    for place, gradient in zip(places, pulled, strict=True):
        found[place] = gradient
    return tuple(found)


def _check_dtypes(inputs: NormInputs | BackwardInputs) -> None:
    """Raise KernelInputError for a tensor whose dtype no device supports.

    Fakes call this function, since no pass that would refuse the tensor runs while torch traces.
    """
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is not None:
            check_float(name, tensor)


def _make_placeholder(x: Tensor) -> Tensor:
    """Make the placeholder for an unwanted result of an operator, which cannot return None."""
    return x.new_empty(0)


def _list_backward_results(op: str, inputs: BackwardInputs, result: Backward) -> tuple[Tensor, ...]:
    """Return the results of a backward operator: a gradient or a placeholder for each input.

    An operator returns no None, and no tensor twice.  So a placeholder stands for a missing gradient, and
    for the residual's gradient if that is dx.
    """
    if not has_own_gradient(op, inputs):
        result = result._replace(dresidual=None)
    return tuple(_make_placeholder(inputs.x) if tensor is None else tensor for tensor in result)


def _make_implementations(op: str) -> dict[tuple[str, str], Callable[..., Any]]:
    """Make the implementations of the operators `op` and `op`_backward."""

    def run_library_forward(*arguments: Any, library: Any = None) -> tuple[Tensor, ...]:
        inputs, options = parse_operator_arguments(NormInputs, op, arguments)
        result = run_forward(library or autograd.select_library(op, inputs.x), options, inputs, stats=True)
        assert result.rstd is not None
        mean, residual_out = (
            _make_placeholder(inputs.x) if t is None else t for t in (result.mean, result.residual_out)
        )
        return result.y, mean, result.rstd, residual_out

    def run_library_backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = parse_operator_arguments(BackwardInputs, op, arguments)
        return _list_backward_results(
            op, inputs, run_backward(autograd.select_library(op, inputs.x), options, inputs)
        )

    def run_plain_backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = parse_operator_arguments(BackwardInputs, op, arguments)
        # Saved statistics are constants; statistics computed here are functions of x.
        return _list_backward_results(
            op, inputs, run_backward(reference, options, inputs._replace(mean=None, rstd=None))
        )

    def make_fake_forward_results(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, options = parse_operator_arguments(NormInputs, op, arguments)
        _check_dtypes(inputs)
        x, residual = inputs.x, inputs.residual
        statistics_shape: tuple[Any, ...] = x.shape[:-1]
        if op == "group_norm" or options.layout is not None:
            statistics_shape = (x.shape[0], *([options.num_groups] if op == "group_norm" else x.shape[2:]))
        statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty(statistics_shape, dtype=statistics_dtype)
        mean = _make_placeholder(x) if op == "rms_norm" else torch.empty_like(rstd)
        residual_out = (
            _make_placeholder(x)
            if residual is None
            else _make_fake_result(options, x, x if op == "group_norm" else residual)
        )
        return _make_fake_result(options, x, x), mean, rstd, residual_out

    def make_fake_backward_results(*arguments: Any) -> tuple[Any, ...]:
        inputs, options = parse_operator_arguments(BackwardInputs, op, arguments)
        _check_dtypes(inputs)
        x, residual = inputs.x, inputs.residual
        made = [
            _make_placeholder(x) if tensor is None else tensor.new_empty(tensor.shape)
            for tensor in inputs.forward_inputs
        ]
        dresidual = _make_placeholder(x)
        if residual is not None and has_own_gradient(op, inputs):
            dresidual = _make_fake_result(options, x, residual)
        return tuple(NormInputs._make(made)._replace(x=_make_fake_result(options, x, x), residual=dresidual))

    def save_forward_context(ctx: Any, arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        inputs, ctx.options = parse_operator_arguments(NormInputs, op, arguments)
        _, mean, rstd, _ = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, None if op == "rms_norm" else mean, rstd)

    def differentiate_forward(
        ctx: Any, dy: Tensor | None, dmean: None, drstd: None, dresidual_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        found = compute_input_gradients(
            partial(run_backward_operator, ctx.options), ctx.saved_tensors, dy, dresidual_out
        )
        of_options = (None,) * len(ctx.options.operator_arguments)
        return list_operator_arguments(NormInputs._make(found), of_options)

    def save_backward_context(ctx: Any, arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        inputs, ctx.options = parse_operator_arguments(BackwardInputs, op, arguments)
        for name, statistic in (("mean", inputs.mean), ("rstd", inputs.rstd)):
            if statistic is not None and statistic.requires_grad:
                raise KernelInputError(f"{name} must not require a gradient: it is taken as a function of x")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs._replace(mean=None, rstd=None))

    def differentiate_backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = list_operator_arguments(BackwardInputs(*ctx.saved_tensors), ctx.options.operator_arguments)
        # Without the first argument, which is the dispatcher's.
        return differentiate_plain_operator(run_plain_backward, arguments, ctx.needs_input_grad[1:], of_results)

    backward_op = f"{op}_backward"
    run_plain_forward = partial(run_library_forward, library=reference)
    return {
        (op, "fake"): make_fake_forward_results,
        (op, "CPU"): run_library_forward,
        (op, "CUDA"): run_library_forward,
        (op, "Autograd"): make_differentiable(op, run_plain_forward, save_forward_context, differentiate_forward),
        (op, "FuncTorchBatched"): run_plain_forward,
        (backward_op, "fake"): make_fake_backward_results,
        (backward_op, "CPU"): run_library_backward,
        (backward_op, "CUDA"): run_library_backward,
        (backward_op, "Autograd"): make_differentiable(
            backward_op, run_plain_backward, save_backward_context, differentiate_backward
        ),
        (backward_op, "FuncTorchBatched"): run_plain_backward,
    }


def _make_fake_result(options: NormOptions, x: Tensor, like: Tensor) -> Tensor:
    """Allocate a fake result with x's shape, the dtype of `like`, and the strides that a pass would give it."""
    if options.op != "group_norm" and options.layout is None:
        return like.new_empty(x.shape)
    if like is not x:
        return torch.empty_like(_make_fake_result(options, x, x), dtype=like.dtype)
    # As `copy_unsupported_strides` chooses, but without a condition on sizes that are unknown before the call.
    layouts = (x, x.permute(0, *range(2, x.dim()), 1)) if x.dim() > 2 else (x,)
    if any(map(is_contiguous_or_false, layouts)):
        return torch.empty_like(x)
    if options.layout is not None and has_channel_rows(x):
        return torch.empty_like(x)
    return convert_to_layout(x, suggests_channels_last(x))


IMPLEMENTATIONS = {place: call for op in OPERATIONS for place, call in _make_implementations(op).items()}
"""What `operator_definitions` calls, by an operator's name and a dispatch key, or "fake"."""
