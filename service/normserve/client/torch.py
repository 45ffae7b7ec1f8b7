"""Modules whose forward and backward run in the service, over whatever transport their client has.

    from normserve.client import Client
    from normserve.client.torch import LayerNorm

    client = Client("unix:///run/normserve.sock")
    norm = LayerNorm(1024, client=client)       # torch's arguments, parameters, state_dict and repr

A state_dict of torch's modules fits, and theirs fits torch's.  Second derivatives are not computed.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normserve.client.client import Client


class _Service:
    """A client as a module keeps it: copies of the module share it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __deepcopy__(self, memo: object) -> "_Service":
        return self


class _Normalise(torch.autograd.Function):
    """One operation, forward and backward in the service."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        result = forward(x, weight, bias, stats=True)
        ctx.backward_pass = backward
        ctx.save_for_backward(x, weight, bias, result.mean, result.rstd)
        y: Tensor = result.y
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        result = ctx.backward_pass(dy, x, weight, bias, mean=mean, rstd=rstd)
        return None, None, result.dx, result.dweight, result.dbias


def _run(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Run a pass; the other one only if somebody will ask for gradients."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        y: Tensor = _Normalise.apply(forward, backward, x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    result: Tensor = forward(x, weight, bias).y
    return result


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm, computed by a normserve.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch.nn.LayerNorm has them.
        client: of the service.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
    """

    def __init__(self, *args: Any, client: Client, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._service = _Service(client)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *normalized_shape] normalised over the last axes.

        Raises:
            ValueError: x ends in other axes.
            ClientError: see `normserve.client.errors`.
        """
        options: dict[str, Any] = {"eps": self.eps, "activation": self.activation}
        client = self._service.client

        def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, **more: Any) -> Any:
            return client.layer_norm(x, weight, bias, **options, **more)

        def backward(dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, **saved: Any) -> Any:
            return client.layer_norm_backward(dy, x, weight, bias, **options, **saved)

        rows, weight, bias = _as_rows(x, self.normalized_shape, self.weight, self.bias)
        return _run(forward, backward, rows, weight, bias).view(x.shape)

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), self.activation)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm, computed by a normserve.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch.nn.RMSNorm has them; eps None is the
            machine epsilon of x's dtype.
        client, activation: as `LayerNorm`.
    """

    def __init__(self, *args: Any, client: Client, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._service = _Service(client)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """As `LayerNorm.forward`."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        options: dict[str, Any] = {"eps": eps, "activation": self.activation}
        client = self._service.client

        def forward(x: Tensor, weight: Tensor | None, _: None, **more: Any) -> Any:
            return client.rms_norm(x, weight, **options, **more)

        def backward(dy: Tensor, x: Tensor, weight: Tensor | None, _: None, mean: None, **saved: Any) -> Any:
            return client.rms_norm_backward(dy, x, weight, **options, **saved)

        rows, weight, _ = _as_rows(x, self.normalized_shape, self.weight, None)
        return _run(forward, backward, rows, weight).view(x.shape)

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), self.activation)


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm, computed by a normserve.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as torch.nn.GroupNorm has them.
        client, activation: as `LayerNorm`.
    """

    def __init__(self, *args: Any, client: Client, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._service = _Service(client)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [N, C, *spatial], contiguous or channels-last; the output keeps its layout.

        Raises:
            ClientError: see `normserve.client.errors`.
        """
        is_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        options: dict[str, Any] = {
            "eps": self.eps,
            "activation": self.activation,
            "layout": "nhwc" if is_last else "nchw",
        }
        client, groups = self._service.client, self.num_groups

        def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, **more: Any) -> Any:
            return client.group_norm(x, groups, weight, bias, **options, **more)

        def backward(dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, **saved: Any) -> Any:
            return client.group_norm_backward(dy, x, groups, weight, bias, **options, **saved)

        y = _run(forward, backward, x.movedim(1, -1) if is_last else x, self.weight, self.bias)
        return y.movedim(-1, 1) if is_last else y

    def extra_repr(self) -> str:
        return _described(super().extra_repr(), self.activation)


def _as_rows(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x with the normalised axes as one, and the parameters likewise.

    Raises:
        ValueError: x ends in other axes.
    """
    if tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(f"x must end in {list(shape)}, got {list(x.shape)}")
    if len(shape) == 1:
        return x, weight, bias
    weight, bias = (None if each is None else each.reshape(-1) for each in (weight, bias))
    return x.reshape(*x.shape[: -len(shape)], prod(shape)), weight, bias


def _described(text: str, activation: str) -> str:
    """torch's `extra_repr`, and what differs from torch's module."""
    return text if activation == "none" else f"{text}, activation={activation!r}"
