"""Drop-in modules: torch's constructors, state_dict and repr, with an activation fused after the norm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from fusednorm.api.torch_norms import (
    compute_group_norm_module,
    compute_layer_norm_over_shape,
    compute_rms_norm_module,
    compute_scripted_norm,
)
from fusednorm.arguments.checks import ActivationName, check_activation, check_weight_offset


class _ActivationMixin(nn.Module):
    """Mixin for torch's modules: an activation after the norm."""

    #: Added to the weight; only for modules that normalise over the last axes.
    weight_offset: float = 0.0

    def __init__(self, *args: Any, activation: ActivationName, **kwargs: Any) -> None:
        check_activation(activation)
        super().__init__(*args, **kwargs)
        self.activation = activation

    def extra_repr(self) -> str:
        """Return torch's string, extended by the settings that torch's module does not have."""
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        return text if self.activation == "none" else f"{text}, activation={self.activation!r}"


class _WeightOffsetMixin(_ActivationMixin):
    """A module that normalises over the last axes."""

    def __init__(self, *args: Any, weight_offset: float, **kwargs: Any) -> None:
        # Before torch's constructor, which resets the parameters.
        self.weight_offset = weight_offset
        super().__init__(*args, **kwargs)
        check_weight_offset(weight_offset, self._parameters["weight"])

    def reset_parameters(self) -> None:
        """Reset the factor of x_hat to one, as in torch; a weight with an offset therefore starts at zero."""
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 - self.weight_offset if name == "weight" else 0.0)


class LayerNorm(_WeightOffsetMixin, nn.LayerNorm):
    """torch.nn.LayerNorm on this library's kernels.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch.nn.LayerNorm has them.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
        weight_offset: 0, or 1 for a weight that is kept around zero and starts there.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName = "none",
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            activation=activation,
            weight_offset=weight_offset,
        )

    if TYPE_CHECKING:

        def __call__(self, input: Tensor) -> Tensor: ...

    def forward(self, input: Tensor) -> Tensor:
        """Normalise input [..., *normalized_shape] over the last axes; float32 under CUDA's autocast.

        Raises:
            KernelInputError: input ends in other axes, or the function refuses an argument.
        """
        shape, weight, bias = self.normalized_shape, self.weight, self.bias
        if not is_scripting():
            return compute_layer_norm_over_shape(
                input, shape, weight, bias, self.eps, weight_offset=self.weight_offset, activation=self.activation
            )
        # TorchScript converts a tuple to a list.
        options = self.eps, self.weight_offset, self.activation, False
        return compute_scripted_norm(input, shape, weight, bias, *options)  # type: ignore[arg-type]


class RMSNorm(_WeightOffsetMixin, nn.RMSNorm):
    """torch.nn.RMSNorm on this library's kernels.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch.nn.RMSNorm has them; eps None is the
            machine epsilon of x's dtype.
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
        weight_offset: 0, or 1 for a weight that is kept around zero and starts there.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName = "none",
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            activation=activation,
            weight_offset=weight_offset,
        )

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., *normalized_shape] over the last axes.

        Under CUDA's autocast, the dtype of the result is that of torch's module.

        Raises:
            KernelInputError: x ends in other axes, or the function refuses an argument.
        """
        shape, weight = self.normalized_shape, self.weight
        if not is_scripting():
            return compute_rms_norm_module(
                x, shape, weight, self.eps, weight_offset=self.weight_offset, activation=self.activation
            )
        # TorchScript converts a tuple to a list.
        options = self.eps, self.weight_offset, self.activation, True
        return compute_scripted_norm(x, shape, weight, None, *options)  # type: ignore[arg-type]


class GroupNorm(_ActivationMixin, nn.GroupNorm):
    """torch.nn.GroupNorm on this library's kernels.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as torch.nn.GroupNorm has them; bias only where
            torch's has it (2.13).
        activation: none, relu, silu, gelu (erf) or gelu_tanh, applied to the output.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: ActivationName = "none",
    ) -> None:
        of_bias = {} if bias else {"bias": bias}
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, activation=activation, **of_bias)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise input [N, C, *spatial] over groups.

        The output keeps a channels-last layout, and is float32 under CUDA's autocast.

        scale and shift [N, C] are an affine step per sample after the norm's: y = act(z * (1 + scale) + shift).

        Raises:
            KernelInputError: the function refuses an argument.
        """
        groups, weight, bias, eps, activation = self.num_groups, self.weight, self.bias, self.eps, self.activation
        if not is_scripting():
            return compute_group_norm_module(
                input, groups, weight, bias, eps, scale=scale, shift=shift, activation=activation
            )
        y: Tensor = torch.ops.fusednorm.group_norm(
            input, weight, bias, None, scale, shift, groups, eps, 0.0, activation, 0.0, 0
        )[0]
        return y
