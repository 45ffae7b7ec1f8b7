"""Drop-in modules: torch's constructors, state_dict and repr, with an activation fused behind the norm."""

from typing import Any

import torch
from torch import Tensor, nn

from fusednorm.autograd import group_norm, layer_norm, rms_norm


def _with_activation(text: str, activation: str) -> str:
    return text if activation == "none" else f"{text}, activation={activation!r}"


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm on this library's kernels.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch.nn.LayerNorm has them.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
    """

    def __init__(self, *args: Any, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *normalized_shape] normalised over the last axes."""
        y = layer_norm(
            x.flatten(-len(self.normalized_shape)),
            None if self.weight is None else self.weight.flatten(),
            None if self.bias is None else self.bias.flatten(),
            self.eps,
            activation=self.activation,
        )
        return y.view(x.shape)

    def extra_repr(self) -> str:
        return _with_activation(super().extra_repr(), self.activation)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm on this library's kernels.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch.nn.RMSNorm has them; eps None is the
            machine epsilon of x's dtype.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
    """

    def __init__(self, *args: Any, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *normalized_shape] normalised over the last axes."""
        y = rms_norm(
            x.flatten(-len(self.normalized_shape)),
            None if self.weight is None else self.weight.flatten(),
            torch.finfo(x.dtype).eps if self.eps is None else self.eps,
            activation=self.activation,
        )
        return y.view(x.shape)

    def extra_repr(self) -> str:
        return _with_activation(super().extra_repr(), self.activation)


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm on this library's kernels.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as torch.nn.GroupNorm has them.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
    """

    def __init__(self, *args: Any, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [N, C, *spatial], contiguous or channels-last; the output keeps its layout."""
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return _with_activation(super().extra_repr(), self.activation)
