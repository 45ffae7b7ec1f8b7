"""The client's operations as differentiable functions of tensors."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normserve.client.client import Client
from normserve.client.local.connection import LocalTransport
from normserve.client.results import BackwardResult, ForwardResult

# Where autocast computes norms in float32 and returns that; on the CPU it computes none.
_AUTOCASTING = "cuda"
_AUTOCASTS_RMS_NORM = bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"))

# Tensors of each operation, in the order in which `_ServiceNorm` is given them, and its statistics.
_ALL_INPUTS = "x", "weight", "bias", "scale", "shift"
_INPUTS = {
    "layer_norm": _ALL_INPUTS,
    "rms_norm": tuple([name for name in _ALL_INPUTS if name != "bias"]),
    "group_norm": _ALL_INPUTS,
}
_STATISTICS = "mean", "rstd"

# On a GPU, kernels have a small x in registers or caches and compute its statistics again, while results that are
# kept, and sent back, cost the client time.
_MOST_RECOMPUTED_BYTES = 2**20


class ClientOperation:
    """An operation of a client, with its forward and backward passes.

    Attributes:
        client: runs the operation.
        method_name: name of the client's method that runs forward.
        options: the arguments of both passes beside tensors; `activation` is among them.
        out_dtype: dtype of y; None is x's.
    """

    __slots__ = ("client", "method_name", "options", "out_dtype")

    def __init__(self, client: Client, name: str, options: Mapping[str, object], out_dtype: str | None) -> None:
        self.client, self.method_name, self.options, self.out_dtype = client, name, options, out_dtype

    def run_forward(self, inputs: Sequence[Tensor | None], stats: bool | None) -> ForwardResult[Tensor]:
        """Run the forward pass on the server.

        Args:
            inputs: tensors in the order of `_INPUTS`.
            stats: whether the result contains mean and rstd.
        """
        run: Callable[..., ForwardResult[Tensor]] = getattr(self.client, self.method_name)
        named = dict(zip(_INPUTS[self.method_name], inputs, strict=True))
        return run(**named, **self.options, out_dtype=self.out_dtype, stats=stats)

    def run_backward(self, dy: Tensor, saved: Sequence[Tensor | None]) -> BackwardResult[Tensor]:
        """Compute the gradients on the server.

        Args: saved: tensors in the order of `_INPUTS`, then mean and rstd.
        """
        run: Callable[..., BackwardResult[Tensor]] = getattr(self.client, f"{self.method_name}_backward")
        named = dict(zip((*_INPUTS[self.method_name], *_STATISTICS), saved, strict=True))
        if self.method_name == "rms_norm":
            del named["mean"]
        return run(dy=dy, **named, **self.options)


class _ServiceNorm(torch.autograd.Function):
    """An autograd function whose forward and backward passes are calls of the server."""

    @staticmethod
    def forward(ctx: Any, operation: ClientOperation, *inputs: Tensor | None) -> Tensor:
        """Compute y on the server, and save the tensors that backward needs, among them mean and rstd.

        For a small CUDA x mean and rstd are not saved, since the server computes them again more quickly.

        Args: inputs: tensors in the order of `_INPUTS`.
        """
        result = operation.run_forward(inputs, stats=_has_kept_statistics(inputs[0]) or None)
        ctx.operation = operation
        statistics: Iterable[Tensor | None] = (result.mean, result.rstd)
        if not isinstance(operation.client._transport, LocalTransport):
            statistics = map(_copy_unless_cuda, statistics)
        # In shared memory, the service finds them again without a copy.
        ctx.save_for_backward(*_select_backward_inputs(inputs, operation, ctx.needs_input_grad), *statistics)
        return _detach_view(result.y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Compute the gradients on the server; return None for the operation and for inputs that need no gradient.

        With grad mode on (create_graph=True), the gradients are such that a second derivative raises an error.
        """
        if torch.is_grad_enabled():
            gradients = _BackwardWithoutDoubleBackward.apply(ctx.operation, dy, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        else:
            gradients = _compute_gradients(ctx.operation, dy, *ctx.saved_tensors)
        # The service computes the gradients of all that it is sent.
        _, *needed = ctx.needs_input_grad
        return None, *[each if is_needed else None for each, is_needed in zip(gradients, needed, strict=False)]


class _BackwardWithoutDoubleBackward(torch.autograd.Function):
    """An autograd function around `_compute_gradients` that refuses second derivatives.

    `once_differentiable` would silently omit the part of a second derivative that depends on x.
    """

    @staticmethod
    def forward(
        ctx: Any, operation: ClientOperation, dy: Tensor, *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return _compute_gradients(operation, dy, *saved)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise RuntimeError(
            "the service computes no second derivatives: use torch's or fusednorm's module for these"
        )


def _compute_gradients(operation: ClientOperation, dy: Tensor, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    result = operation.run_backward(dy, saved)
    _, *parameters = _INPUTS[operation.method_name]
    gradients = [getattr(result, f"d{name}") for name in parameters]
    return _detach_view(result.dx), *map(_copy_unless_cuda, gradients)


def _has_kept_statistics(x: Tensor | None) -> bool:
    return x is None or not x.is_cuda or x.nbytes > _MOST_RECOMPUTED_BYTES


def _copy_unless_cuda(tensor: Tensor | None) -> Tensor | None:
    """Copy a short host tensor that may be a view of a response's buffer, so that the buffer can be freed.

    A CUDA tensor is not copied; None stays None.
    """
    if tensor is None:
        return None
    return _detach_view(tensor) if tensor.is_cuda else tensor.clone()


def _detach_view(result: Tensor) -> Tensor:
    """Return the tensor without its view relation, because autograd forbids in-place changes of such a view."""
    return result.data


def _select_backward_inputs(
    inputs: Sequence[Tensor | None], operation: ClientOperation, needs_grad: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the inputs that backward needs, with None for a bias or shift on which no needed gradient depends.

    Args: needs_grad: for the operation and each of the inputs, whether its gradient is needed.
    """
    if operation.options["activation"] != "none":
        return inputs
    names = _INPUTS[operation.method_name]
    given = dict(zip(names, inputs, strict=True))
    needs = dict(zip(names, needs_grad[1:], strict=True))
    # The gradient of scale depends on the norm's output, and therefore on bias.
    if given["scale"] is None and not needs.get("bias"):
        given["bias"] = None
    if not needs["shift"]:
        given["shift"] = None
    return [given[name] for name in names]


def _compute(operation: ClientOperation, inputs: Sequence[Tensor | None]) -> Tensor:
    """Compute y through the autograd function if the call needs that, otherwise by the forward pass alone.

    Raises:
        RuntimeError: `torch.jit.trace` is recording, which cannot record a call of the server.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError("torch.jit.trace cannot record a call of the service: use the module as it is")
    if _must_pass_autograd(inputs):
        y: Tensor = _ServiceNorm.apply(operation, *inputs)  # type: ignore[no-untyped-call]
        return y
    return _detach_view(operation.run_forward(inputs, stats=None).y)


def _must_pass_autograd(inputs: Sequence[Tensor | None]) -> bool:
    """Return whether the call must pass through the autograd function.

    That is so if a gradient is needed, or if forward-mode AD or a functorch transform is active, which the
    autograd function then refuses.
    """
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


_untraced: Callable[..., Tensor] | None = None


def normalise(client: Client, name: str, options: Mapping[str, object], *inputs: Tensor | None) -> Tensor:
    """Compute y of an operation on the server, differentiable with respect to all tensors.

    `torch.compile` breaks its graph at this call.

    Args:
        name, options: the client's method, and the arguments of both of its passes beside tensors;
            `activation` is among them.
        inputs: x and the operation's parameters, None where there is none: weight, bias, scale and shift, for
            RMSNorm without bias.
    """
    global _untraced
    out_dtype = _get_autocast_dtype(name, inputs[0]) if torch.is_autocast_enabled(_AUTOCASTING) else None
    operation = ClientOperation(client, name, options, out_dtype)
    # Where this is not loaded nothing is compiled; loading it takes longer than the client's first second of work.
    if "torch._dynamo" not in sys.modules:
        return _compute(operation, inputs)
    if _untraced is None:
        _untraced = torch.compiler.disable(_compute)
    return _untraced(operation, inputs)


def _get_autocast_dtype(name: str, x: Tensor | None) -> str | None:
    if x is None or x.device.type != _AUTOCASTING or (name == "rms_norm" and not _AUTOCASTS_RMS_NORM):
        return None
    return "float32"
