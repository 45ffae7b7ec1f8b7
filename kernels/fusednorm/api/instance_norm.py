"""InstanceNorm: GroupNorm with as many groups as channels, as a differentiable function and as torch's modules."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.modules.instancenorm import _InstanceNorm

from fusednorm.api.autograd import group_norm
from fusednorm.api.modules import ActivationMixin
from fusednorm.arguments.checks import ActivationName
from fusednorm.tensors.arrays import check_tensors


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Apply InstanceNorm to x [N, C, *spatial], differentiable in x, weight, bias, scale and shift.

    y = dropout(act(z * (1 + scale) + shift)), z = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and
    the biased variance of each channel in a sample.  scale and shift are the affine step per sample of adaptive
    InstanceNorm.

    It is `group_norm` with as many groups as channels.  CPU tensors are computed by torch's functions, at about
    torch's speed and also without Triton; CUDA tensors by this library's kernels.  Statistics and sums are float32
    (float64 for a float64 x), and the result is rounded once.

    Args:
        x: [N, C, *spatial], float32, float16 or bfloat16, on the CPU also float64; any strides.
        weight: [C], any of these dtypes, on x's device; None (default) for ones.
        bias: [C], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        scale: [N, C], any of these dtypes; None (default) for zeros.
        shift: [N, C], any of these dtypes; None (default) for zeros.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.  The mask
            depends on the layout of x.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.

    Returns:
        Tensor: y, in x's shape and dtype; channels-last if x is, otherwise contiguous.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: CUDA only: the call needs 2^31 programs or more.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Source: Ulyanov, Vedaldi, Lempitsky: Instance Normalization, arXiv:1607.08022.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(2, 32, 8, 8, 8, requires_grad=True)  # or with device="cuda"
        >>> y = fusednorm.instance_norm(x, activation="leaky_relu", negative_slope=0.01)
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([2, 32, 8, 8, 8]), torch.Size([2, 32, 8, 8, 8]))
    """
    check_tensors(("x",), (x,))
    # An x without channels is refused for its shape, whatever the groups are.
    groups = x.shape[1] if x.dim() > 1 else 1
    return group_norm(
        x,
        groups,
        weight,
        bias,
        eps,
        scale=scale,
        shift=shift,
        activation=activation,
        negative_slope=negative_slope,
        dropout=dropout,
        seed=seed,
    )


def _activate_by_torch(y: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Apply an activation by torch's own function; TorchScript can compile this function."""
    if activation == "relu":
        y = F.relu(y)
    elif activation == "leaky_relu":
        y = F.leaky_relu(y, negative_slope)
    elif activation == "silu":
        y = F.silu(y)
    elif activation == "gelu":
        y = F.gelu(y)
    elif activation == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    return y


class _InstanceNormModule(ActivationMixin, _InstanceNorm):
    """The part of the InstanceNorm modules that does not depend on the number of axes.

    torch's forward checks the input, and adds and removes the batch of an unbatched one.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor) -> Tensor: ...

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        """Compute the norm and the activation of an input with a batch; torch's forward calls this method."""
        weight, bias, eps = self.weight, self.bias, self.eps
        activation, negative_slope = self.activation, self.negative_slope
        if self.track_running_stats:
            momentum = 0.0 if self.momentum is None else self.momentum
            y = F.instance_norm(
                input, self.running_mean, self.running_var, weight, bias, self.training, momentum, eps
            )
            return _activate_by_torch(y, activation, negative_slope)
        positions = 1
        for size in input.shape[2:]:
            positions *= size
        if positions == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
        if not is_scripting():
            return instance_norm(input, weight, bias, eps, activation=activation, negative_slope=negative_slope)
        of_groups = input.shape[1], eps, 0.0, activation, 0.0, 0, negative_slope
        scripted: Tensor = torch.ops.fusednorm.group_norm(input, weight, bias, None, None, None, *of_groups)[0]
        return scripted


class InstanceNorm1d(_InstanceNormModule, nn.InstanceNorm1d):
    """A `torch.nn.InstanceNorm1d` that this library computes, with an optional activation after the norm.

    y = act((x - mean) / sqrt(var + eps) * weight + bias), with the mean and the biased variance of each channel in
    a sample.

    Parameters, buffers, their names, state_dict and initial values, checks and warnings are those of
    `torch.nn.InstanceNorm1d`.  CPU tensors are computed by torch's functions, at about torch's speed and also
    without Triton; CUDA tensors by this library's kernels.  float64 works only on the CPU.  With running statistics
    torch's own functions compute the norm and the activation.

    Args:
        num_features: C, the number of channels of the input.
        eps: added to the variance; default 1e-5.
        momentum: weight of new values in running statistics; default 0.1.
        affine: whether the module has a weight and a bias [C]; default False.
        track_running_stats: whether to keep running statistics, and use them in evaluation; default False.
        device, dtype: of the parameters; None (default) for torch's defaults.
        bias: whether there is a bias beside the weight; default True.  False needs a torch whose InstanceNorm1d has
            this argument (2.13).
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.

    The input of a call is [N, C, L], or [C, L] without a batch, in float32, float16 or bfloat16, on the
    CPU also float64; any strides.  The result has its shape and dtype, and is channels-last if the input is.

    Raises:
        KernelInputError: activation is none of these, or negative_slope is invalid; in a call a wrong dtype or
            device.
        ValueError: in a call another number of axes, another number of channels if `affine`, or one value for each
            channel.
        ModuleNotFoundError: in a call a CUDA tensor without Triton installed.
        TypeError: bias is False, and torch's InstanceNorm1d does not have it.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.InstanceNorm1d(32, affine=True, activation="leaky_relu")  # or with device="cuda"
        >>> norm(torch.randn(2, 32, 100)).shape
        torch.Size([2, 32, 100])
    """


class InstanceNorm2d(_InstanceNormModule, nn.InstanceNorm2d):
    """A `torch.nn.InstanceNorm2d` that this library computes, with an optional activation after the norm.

    y = act((x - mean) / sqrt(var + eps) * weight + bias), with the mean and the biased variance of each channel in
    a sample.

    Parameters, buffers, their names, state_dict and initial values, checks and warnings are those of
    `torch.nn.InstanceNorm2d`.  CPU tensors are computed by torch's functions, at about torch's speed and also
    without Triton; CUDA tensors by this library's kernels.  float64 works only on the CPU.  With running statistics
    torch's own functions compute the norm and the activation.

    Args:
        num_features: C, the number of channels of the input.
        eps: added to the variance; default 1e-5.
        momentum: weight of new values in running statistics; default 0.1.
        affine: whether the module has a weight and a bias [C]; default False.
        track_running_stats: whether to keep running statistics, and use them in evaluation; default False.
        device, dtype: of the parameters; None (default) for torch's defaults.
        bias: whether there is a bias beside the weight; default True.  False needs a torch whose InstanceNorm2d has
            this argument (2.13).
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.

    The input of a call is [N, C, H, W], or [C, H, W] without a batch, in float32, float16 or bfloat16, on the
    CPU also float64; any strides.  The result has its shape and dtype, and is channels-last if the input is.

    Raises:
        KernelInputError: activation is none of these, or negative_slope is invalid; in a call a wrong dtype or
            device.
        ValueError: in a call another number of axes, another number of channels if `affine`, or one value for each
            channel.
        ModuleNotFoundError: in a call a CUDA tensor without Triton installed.
        TypeError: bias is False, and torch's InstanceNorm2d does not have it.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.InstanceNorm2d(32, affine=True, activation="leaky_relu")  # or with device="cuda"
        >>> norm(torch.randn(2, 32, 8, 8)).shape
        torch.Size([2, 32, 8, 8])
    """


class InstanceNorm3d(_InstanceNormModule, nn.InstanceNorm3d):
    """A `torch.nn.InstanceNorm3d` that this library computes, with an optional activation after the norm.

    y = act((x - mean) / sqrt(var + eps) * weight + bias), with the mean and the biased variance of each channel in
    a sample.

    Parameters, buffers, their names, state_dict and initial values, checks and warnings are those of
    `torch.nn.InstanceNorm3d`.  CPU tensors are computed by torch's functions, at about torch's speed and also
    without Triton; CUDA tensors by this library's kernels.  float64 works only on the CPU.  With running statistics
    torch's own functions compute the norm and the activation.

    Args:
        num_features: C, the number of channels of the input.
        eps: added to the variance; default 1e-5.
        momentum: weight of new values in running statistics; default 0.1.
        affine: whether the module has a weight and a bias [C]; default False.
        track_running_stats: whether to keep running statistics, and use them in evaluation; default False.
        device, dtype: of the parameters; None (default) for torch's defaults.
        bias: whether there is a bias beside the weight; default True.  False needs a torch whose InstanceNorm3d has
            this argument (2.13).
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.

    The input of a call is [N, C, D, H, W], or [C, D, H, W] without a batch, in float32, float16 or bfloat16, on the
    CPU also float64; any strides.  The result has its shape and dtype, and is channels-last if the input is.

    Raises:
        KernelInputError: activation is none of these, or negative_slope is invalid; in a call a wrong dtype or
            device.
        ValueError: in a call another number of axes, another number of channels if `affine`, or one value for each
            channel.
        ModuleNotFoundError: in a call a CUDA tensor without Triton installed.
        TypeError: bias is False, and torch's InstanceNorm3d does not have it.

    Examples:
        >>> import torch, fusednorm
        >>> norm = fusednorm.InstanceNorm3d(32, affine=True, activation="leaky_relu")  # or with device="cuda"
        >>> norm(torch.randn(2, 32, 8, 8, 8)).shape
        torch.Size([2, 32, 8, 8, 8])
    """
