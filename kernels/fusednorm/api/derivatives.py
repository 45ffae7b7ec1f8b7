"""Derivatives of the operators, and their batching by `torch.vmap`.

Reverse mode has a formula for each operator.  Forward mode, `vmap` and derivatives of backward passes are computed
by torch from the same operation in plain torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

Results = tuple[Tensor, ...]
Plain = Callable[..., Results]
"""An operator in plain torch, with the operator's arguments and results."""

Setup = Callable[[Any, tuple[Any, ...], Results], None]
"""A function that saves the arguments and results needed by the derivative in a context."""

Derivative = Callable[..., tuple[Tensor | None, ...]]
"""A function from the context and the gradients of the results to the gradients of the arguments."""

_TRANSFORMED = torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
_dispatch_modes = torch._C._len_torch_dispatch_stack


def register_derivatives(
    library: torch.library.Library, name: str, plain: Plain, setup: Setup, derivative: Derivative
) -> None:
    """Make the operator `name` of `library` differentiable in both modes and usable in `torch.vmap`.

    Unlike with `torch.library.register_autograd`, the operator works in (nested) transforms of `torch.func`, and
    tangents are not lost.
    """
    operator = getattr(getattr(torch.ops, library.ns), name).default
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

    library.impl(name, dispatch_forward, "Autograd", with_keyset=True)
    library.impl(name, plain, "FuncTorchBatched")


def has_tangent(argument: Any) -> bool:
    """Return whether an argument has a forward-mode tangent."""
    # Level 0: torch has no other level yet.
    return isinstance(argument, Tensor) and torch._VF._unpack_dual(argument, level=0)[1] is not None


def differentiate_plain_operator(
    plain: Plain, arguments: tuple[Any, ...], needed: tuple[bool, ...], gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Compute gradients of the needed arguments from gradients of the results; they are differentiable, too.

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
