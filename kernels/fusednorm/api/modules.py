"""Drop-in modules: torch's constructors, state_dict and repr, with an activation fused after the norm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from fusednorm.api.module_norms import (
    compute_group_norm_module,
    compute_layer_norm_over_shape,
    compute_rms_norm_module,
    compute_scripted_norm,
)
from fusednorm.arguments.checks import (
    DEFAULT_SLOPE,
    ActivationName,
    LayoutName,
    check_layout,
    check_weight_offset,
    validate_activation,
    validate_negative_slope,
)
from fusednorm.errors import KernelInputError


class ActivationMixin(nn.Module):
    """Mixin that adds an activation after the norm to a norm module of torch."""

    #: Added to the weight; only for modules that normalise over the last axes.
    weight_offset: float = 0.0

    #: None for the last axes, or "nchw" for the channels of [N, C, *spatial]; only for modules of rows.
    layout: str | None = None

    #: leaky_relu's factor of negative values; here for modules that an earlier version pickled.
    negative_slope: float = DEFAULT_SLOPE

    def __init__(self, *args: Any, activation: ActivationName | None, negative_slope: float, **kwargs: Any) -> None:
        name = validate_activation(activation)
        slope = validate_negative_slope(negative_slope, name)
        super().__init__(*args, **kwargs)
        self.activation, self.negative_slope = name, slope

    def extra_repr(self) -> str:
        """Return torch's text, followed by the options that torch's module does not have.

        Returns:
            str: the text between the parentheses of the module's repr.
        """
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.layout is not None:
            text += f", layout={self.layout!r}"
        if self.activation != "none":
            text += f", activation={self.activation!r}"
        return text if self.activation != "leaky_relu" else f"{text}, negative_slope={self.negative_slope}"


class _RowNormMixin(ActivationMixin):
    """Mixin that adds an activation, a weight offset and a layout to torch modules that normalise over rows."""

    def __init__(self, *args: Any, weight_offset: float, layout: LayoutName | None, **kwargs: Any) -> None:
        check_layout(layout)
        # Before torch's constructor, which resets the parameters.
        self.weight_offset = weight_offset
        super().__init__(*args, **kwargs)
        self.layout = layout
        check_weight_offset(weight_offset, self._parameters["weight"])
        shape: Any = self.normalized_shape
        if layout is not None and len(shape) != 1:
            raise KernelInputError(f"layout {layout!r} needs a normalized_shape of one axis, C, got {list(shape)}")

    def reset_parameters(self) -> None:
        """Set the weight to 1 - weight_offset and the bias to 0, so that the affine step changes nothing."""
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 - self.weight_offset if name == "weight" else 0.0)


class LayerNorm(_RowNormMixin, nn.LayerNorm):
    """A `torch.nn.LayerNorm` that this library computes, with an optional activation after the norm.

    y = act(z * (1 + scale) + shift), z = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the
    mean and the biased variance over the last axes.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.LayerNorm`.  CPU tensors are
    computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by this library's
    kernels.  float64 works only on the CPU.

    Args:
        normalized_shape: an int or a sequence of ints: the sizes of the last axes, over which the module
            normalises.
        eps: added to the variance; default 1e-5.
        elementwise_affine: whether the module has parameters of normalized_shape; default True.
        bias: whether there is a bias beside the weight; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        weight_offset: added to the weight: 0 (default), or 1 for a weight that is kept around zero and starts
            there.
        layout: None (default) for a norm over the last axes; "nchw" for one over the channels of an input [N, C,
            *spatial], as models' LayerNorm2d, with normalized_shape C.

    Raises:
        KernelInputError: activation, weight_offset or layout is none of these, weight_offset is 1 without a weight,
            negative_slope is invalid, or normalized_shape has several axes with a layout.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.LayerNorm(1024, activation="silu")  # or with device="cuda"
        >>> norm(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
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
        activation: ActivationName | None = "none",
        negative_slope: float = 0.01,
        weight_offset: float = 0.0,
        layout: LayoutName | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            activation=activation,
            negative_slope=negative_slope,
            weight_offset=weight_offset,
            layout=layout,
        )

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise the input over its last axes, or with a layout over its channels.

        Args:
            input: [..., *normalized_shape], or [N, C, *spatial] with a layout, float32, float16 or bfloat16, on
                the CPU also float64; any strides.
            scale, shift: the affine step of each sample, [*leading, *normalized_shape] with the first axes of the
                input, and axes of one element between or without, or [N, C] with a layout; None (default) for
                zeros.

        Returns:
            Tensor: in the input's shape and dtype; float32 under CUDA's autocast.

        Raises:
            KernelInputError: input ends in other axes, or a shape, dtype or device is wrong.
            ModuleNotFoundError: a CUDA tensor without Triton installed.
        """
        shape, weight, bias, eps = self.normalized_shape, self.weight, self.bias, self.eps
        offset, activation = self.weight_offset, self.activation
        if not is_scripting():
            return compute_layer_norm_over_shape(
                input,
                shape,
                weight,
                bias,
                eps,
                self.layout,  # type: ignore[arg-type]
                scale=scale,
                shift=shift,
                weight_offset=offset,
                activation=activation,
                negative_slope=self.negative_slope,
            )
        # TorchScript converts a tuple to a list.
        options = eps, offset, activation, self.negative_slope, False, self.layout
        return compute_scripted_norm(input, shape, weight, bias, scale, shift, *options)  # type: ignore[arg-type]


class RMSNorm(_RowNormMixin, nn.RMSNorm):
    """A `torch.nn.RMSNorm` that this library computes, with an optional activation after the norm.

    y = act(z * (1 + scale) + shift), z = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), with the mean over
    the last axes.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.RMSNorm`.  CPU tensors are
    computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by this library's
    kernels.  float64 works only on the CPU.

    Args:
        normalized_shape: an int or a sequence of ints: the sizes of the last axes, over which the module
            normalises.
        eps: added to the mean of squares; None (default) for the machine epsilon of x's dtype, of float32 for a
            16-bit x.
        elementwise_affine: whether the module has parameters of normalized_shape; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        weight_offset: added to the weight: 0 (default), or 1 for a weight that is kept around zero and starts
            there.
        layout: None (default) for a norm over the last axes; "nchw" for one over the channels of an input [N, C,
            *spatial], as models' LayerNorm2d, with normalized_shape C.

    Raises:
        KernelInputError: activation, weight_offset or layout is none of these, weight_offset is 1 without a weight,
            negative_slope is invalid, or normalized_shape has several axes with a layout.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.RMSNorm(1024, eps=1e-6)  # or with device="cuda"
        >>> norm(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName | None = "none",
        negative_slope: float = 0.01,
        weight_offset: float = 0.0,
        layout: LayoutName | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            activation=activation,
            negative_slope=negative_slope,
            weight_offset=weight_offset,
            layout=layout,
        )

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise x over its last axes, or with a layout over its channels.

        Args:
            x: [..., *normalized_shape], or [N, C, *spatial] with a layout, float32, float16 or bfloat16, on
                the CPU also float64; any strides.
            scale, shift: the affine step of each sample, [*leading, *normalized_shape] with the first axes of the
                input, and axes of one element between or without, or [N, C] with a layout; None (default) for
                zeros.

        Returns:
            Tensor: in x's shape and dtype; under CUDA's autocast in the dtype of torch's module.

        Raises:
            KernelInputError: x ends in other axes, or a shape, dtype or device is wrong.
            ModuleNotFoundError: a CUDA tensor without Triton installed.
        """
        shape, weight, eps = self.normalized_shape, self.weight, self.eps
        offset, activation = self.weight_offset, self.activation
        if not is_scripting():
            return compute_rms_norm_module(
                x,
                shape,
                weight,
                eps,
                self.layout,  # type: ignore[arg-type]
                scale=scale,
                shift=shift,
                weight_offset=offset,
                activation=activation,
                negative_slope=self.negative_slope,
            )
        # TorchScript converts a tuple to a list.
        options = eps, offset, activation, self.negative_slope, True, self.layout
        return compute_scripted_norm(x, shape, weight, None, scale, shift, *options)  # type: ignore[arg-type]


class GroupNorm(ActivationMixin, nn.GroupNorm):
    """A `torch.nn.GroupNorm` that this library computes, with an optional activation after the norm.

    y = act(z * (1 + scale) + shift), z = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and the
    biased variance of each group of channels in a sample.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.GroupNorm`.  CPU tensors are
    computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by this library's
    kernels.  float64 works only on the CPU.

    Args:
        num_groups: number of groups; it divides num_channels.
        num_channels: C, the size of the input's second axis.
        eps: added to the variance; default 1e-5.
        affine: whether the module has a weight and a bias [C]; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        bias: whether there is a bias beside the weight; default True.  False needs a torch whose GroupNorm has
            this argument (2.13).
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.

    Raises:
        KernelInputError: activation is none of these, or negative_slope is invalid.
        ValueError: num_groups does not divide num_channels.
        TypeError: bias is False, and torch's GroupNorm does not have it.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.GroupNorm(32, 64, activation="silu")  # or with device="cuda"
        >>> norm(torch.randn(2, 64, 16, 16)).shape
        torch.Size([2, 64, 16, 16])
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
        activation: ActivationName | None = "none",
        negative_slope: float = 0.01,
    ) -> None:
        options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
        if not bias:
            options["bias"] = bias
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise the input over groups of channels.

        Args:
            input: [N, C, *spatial], float32, float16 or bfloat16, on the CPU also float64; any strides.
            scale, shift: [N, C], the affine step per sample, y = act(z * (1 + scale) + shift); None (default) for
                zeros.

        Returns:
            Tensor: in the input's shape and dtype, channels-last if the input is; float32 under CUDA's autocast.

        Raises:
            KernelInputError: a shape, dtype or device is wrong.
            ModuleNotFoundError: a CUDA tensor without Triton installed.
        """
        groups, weight, bias, eps = self.num_groups, self.weight, self.bias, self.eps
        activation, negative_slope = self.activation, self.negative_slope
        if not is_scripting():
            return compute_group_norm_module(
                input,
                groups,
                weight,
                bias,
                eps,
                scale=scale,
                shift=shift,
                activation=activation,
                negative_slope=negative_slope,
            )
        y: Tensor = torch.ops.fusednorm.group_norm(
            input, weight, bias, None, scale, shift, groups, eps, 0.0, activation, 0.0, 0, negative_slope
        )[0]
        return y
