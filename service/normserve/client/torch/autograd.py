"""The client's operations as differentiable functions of tensors."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normserve.client.client import Client
from normserve.client.local.blocking import LocalTransport
from normserve.client.results import BackwardResult, ForwardResult

# Where autocast computes norms in float32 and returns that.
_AUTOCASTING_DEVICES = ("cuda",)
_AUTOCASTS_RMS_NORM = bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"))


class Operation:
    """One of the client's operations, both of its passes.

    Attributes:
        client: runs it.
        name: of the client's method that runs forward.
        options: what both passes are told beside tensors.
        out_dtype: of y; None is x's.
    """

    __slots__ = ("client", "name", "options", "out_dtype")

    def __init__(self, client: Client, name: str, options: Mapping[str, object], out_dtype: str | None) -> None:
        self.client, self.name, self.options, self.out_dtype = client, name, options, out_dtype

    def forward(self, tensors: Mapping[str, Tensor], *, stats: bool) -> ForwardResult[Tensor]:
        run: Callable[..., ForwardResult[Tensor]] = getattr(self.client, self.name)
        return run(**tensors, **self.options, out_dtype=self.out_dtype, stats=stats or None)

    def backward(self, tensors: Mapping[str, Tensor]) -> BackwardResult[Tensor]:
        run: Callable[..., BackwardResult[Tensor]] = getattr(self.client, f"{self.name}_backward")
        return run(**tensors, **self.options)


_INPUTS = ("x", "weight", "bias", "scale", "shift")


class _Norm(torch.autograd.Function):
    """y of an operation of x, weight, bias, scale and shift, and its derivative."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, is_differentiated: bool, *inputs: Tensor | None) -> Tensor:
        tensors = _given(inputs)
        result = operation.forward(tensors, stats=is_differentiated)
        if is_differentiated:
            ctx.operation = operation
            statistics: Iterable[Tensor | None] = (result.mean, result.rstd)
            if not isinstance(operation.client._transport, LocalTransport):
                statistics = map(_alone, statistics)
            # In shared memory, the service finds them again without a copy.
            ctx.save_for_backward(*_for_backward(inputs, operation, ctx.needs_input_grad), *statistics)
        # Not as a view of what was received: autograd does not allow such a result to be changed in place.
        return result.y.data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            gradients = _Gradients.apply(ctx.operation, dy, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        else:
            gradients = _gradients(ctx.operation, dy, *ctx.saved_tensors)
        # The service computes the gradients of all that it is sent.
        _, _, *needed = ctx.needs_input_grad
        return None, None, *[each if is_needed else None for each, is_needed in zip(gradients, needed, strict=True)]


class _Gradients(torch.autograd.Function):
    """`_gradients` where they may be differentiated in turn, which is refused.

    `once_differentiable` would leave out of a second derivative, without a word, what comes by way of x.
    """

    @staticmethod
    def forward(ctx: Any, operation: Operation, dy: Tensor, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(operation, dy, *saved)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise RuntimeError(
            "the service computes no second derivatives: use torch's or fusednorm's module for these"
        )


def _gradients(operation: Operation, dy: Tensor, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, mean, rstd = saved
    tensors = {"dy": dy, **_given(inputs)}
    if mean is not None:
        tensors["mean"] = mean
    if rstd is not None:
        tensors["rstd"] = rstd
    result = operation.backward(tensors)
    return result.dx, *map(_alone, (result.dweight, result.dbias, result.dscale, result.dshift))


def _given(inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in zip(_INPUTS, inputs, strict=True) if tensor is not None}


def _alone(tensor: Tensor | None) -> Tensor | None:
    """A short tensor that is kept for long, in memory of its own: on the host results may be parts of an answer."""
    return tensor if tensor is None or tensor.is_cuda else tensor.clone()


def _for_backward(
    inputs: Sequence[Tensor | None], operation: Operation, needs_grad: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The inputs that backward needs: what is added after all else only where its gradient is asked for."""
    x, weight, bias, scale, shift = inputs
    if operation.options["activation"] == "none":
        *_, needs_bias, _, needs_shift = needs_grad
        # The gradient of scale is that of a product with what bias is a part of.
        return x, weight, bias if needs_bias or scale is not None else None, scale, shift if needs_shift else None
    return inputs


def _computed(operation: Operation, *inputs: Tensor | None) -> Tensor:
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError("torch.jit.trace cannot record a call of the service: use the module as it is")
    is_differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )
    y: Tensor = _Norm.apply(operation, is_differentiated, *inputs)  # type: ignore[no-untyped-call]
    return y


_untraced: Callable[..., Tensor] | None = None


def normalise(
    client: Client,
    name: str,
    options: Mapping[str, object],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """y of one of the client's operations, differentiable in all tensors; a graph break for `torch.compile`.

    Args:
        name, options: of the client's method, and what both of its passes are told beside tensors; `activation` is
            among it.
    """
    global _untraced
    operation = Operation(client, name, options, _out_dtype(name, x))
    # Where this is not loaded nothing is compiled; loading it takes longer than the client's first second of work.
    if "torch._dynamo" not in sys.modules:
        return _computed(operation, x, weight, bias, scale, shift)
    if _untraced is None:
        _untraced = torch.compiler.disable(_computed)
    return _untraced(operation, x, weight, bias, scale, shift)


def _out_dtype(name: str, x: Tensor) -> str | None:
    device = x.device.type
    if device not in _AUTOCASTING_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return "float32" if name != "rms_norm" or _AUTOCASTS_RMS_NORM else None
