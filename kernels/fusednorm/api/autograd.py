"""Differentiable functions: `layer_norm`, `rms_norm`, `group_norm`, and each of them after a residual addition.

If torch traces, transforms or observes the call, it sees the operators of `operators`, which the package
registers.  Otherwise these operators would cost the host several times as much as the passes, so the call goes
directly to its pass, through a `torch.autograd.Function` if it is differentiated.  A plain norm of CPU tensors is
torch's own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fusednorm import cpu
from fusednorm.api.nested_norms import compute_nested_norm
from fusednorm.api.observers import is_differentiated, is_observed
from fusednorm.api.sharding import try_register_shardings
from fusednorm.api.uniform_passes import compute_input_gradients, run_backward, run_backward_operator, run_forward
from fusednorm.arguments.checks import ActivationName, LayoutName, require_residual
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.operator_arguments import list_operator_arguments
from fusednorm.arguments.options import NormOptions, OptionValues, is_replayable
from fusednorm.cpu import plain_norms
from fusednorm.devices.device_properties import HAS_TRITON, INTERPRETED, make_missing_triton_error
from fusednorm.results import Added, Backward, Forward
from fusednorm.tensors.arrays import check_tensors

if HAS_TRITON:
    from fusednorm.api import group_norm as group_norm_passes
    from fusednorm.api import layer_norm as layer_norm_passes
    from fusednorm.launch.extension_calls import set_gradient_function
    from fusednorm.launch.prepared_kernels import can_bypass_triton
    from fusednorm.launch.replay_cache import encode_policy, get_extension


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
) -> Tensor:
    """Apply LayerNorm over the last axis of x, or over its channels, differentiable in all tensors.

    y = dropout(act(z * (1 + scale) + shift)), z = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias,
    with the mean and the biased variance of each row.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [..., cols], float32, float16 or bfloat16, on the CPU also float64; any strides.  A jagged nested tensor
            with rows of one length is accepted, too.
        weight: [cols], any of these dtypes, on x's device; None (default) for ones.  [heads, cols] for a separate
            weight per head of x [..., heads, cols].
        bias: [cols] or [heads, cols], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: one row for each sample of x, or for each of its leading axes: x.shape[:k] and the last axis,
            with axes of one element between or without ([N, cols] or [N, 1, cols] for x [N, tokens, cols]), any of
            these dtypes; None (default) for zeros.  Both have one shape.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], as LayerNorm2d: parameters [C], scale and shift [N, C], contiguous or channels-last.

    Returns:
        Tensor: y, in x's shape and dtype, contiguous; with a layout in x's memory format.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: CUDA only: over 2^30 columns; over 65535 heads with separate parameters; in
            backward with such heads, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(8, 1024, requires_grad=True)  # or with device="cuda"
        >>> weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
        >>> y = fusednorm.layer_norm(x, weight, bias, activation="gelu")
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([8, 1024]), torch.Size([8, 1024]))
    """
    values = "layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return _dispatch_norm(values, x, weight, bias, None, scale, shift, None)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
) -> Tensor:
    """Apply RMSNorm over the last axis of x, or over its channels, differentiable in all tensors.

    y = dropout(act(z * (1 + scale) + shift)), z = x / sqrt(mean(x^2) + eps) * (weight + weight_offset).  scale and
    shift are the affine step of each sample in adaptive norms.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [..., cols], float32, float16 or bfloat16, on the CPU also float64; any strides.  A jagged nested tensor
            with rows of one length is accepted, too.
        weight: [cols], any of these dtypes, on x's device; None (default) for ones.  [heads, cols] for a separate
            weight per head of x [..., heads, cols].
        eps: added to the mean of squares; at least 0 and finite; default 1e-6.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: one row for each sample of x, or for each of its leading axes: x.shape[:k] and the last axis,
            with axes of one element between or without ([N, cols] or [N, 1, cols] for x [N, tokens, cols]), any of
            these dtypes; None (default) for zeros.  Both have one shape.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], as LayerNorm2d: parameters [C], scale and shift [N, C], contiguous or channels-last.

    Returns:
        Tensor: y, in x's shape and dtype, contiguous; with a layout in x's memory format.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: CUDA only: over 2^30 columns; over 65535 heads with separate parameters; in
            backward with such heads, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(8, 1024, requires_grad=True)  # or with device="cuda"
        >>> y = fusednorm.rms_norm(x, torch.zeros_like(x[0]), weight_offset=1.0)
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([8, 1024]), torch.Size([8, 1024]))
    """
    values = "rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return _dispatch_norm(values, x, weight, None, None, scale, shift, None)[0]


def group_norm(
    x: Tensor,
    num_groups: int,
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
    """Apply GroupNorm to x [N, C, *spatial], differentiable in x, weight, bias, scale and shift.

    y = dropout(act(z * (1 + scale) + shift)), z = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and
    the biased variance of each group of C / num_groups channels in a sample.  scale and shift are the affine step
    per sample of adaptive GroupNorm.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [N, C, *spatial], float32, float16 or bfloat16, on the CPU also float64; any strides.
        num_groups: number of groups, an int that divides C.
        weight: [C], any of these dtypes, on x's device; None (default) for ones.
        bias: [C], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        scale, shift: [N, C], any of these dtypes; None (default) for zeros.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.  The mask
            depends on the layout of x.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.

    Returns:
        Tensor: y, in x's shape and dtype; channels-last if x is, otherwise contiguous.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or num_groups does not divide C.
        UnsupportedShapeError: CUDA only: the call needs 2^31 programs or more.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(2, 64, 16, 16, requires_grad=True)  # or with device="cuda"
        >>> weight, bias = torch.ones_like(x[0, :, 0, 0]), torch.zeros_like(x[0, :, 0, 0])
        >>> y = fusednorm.group_norm(x, 32, weight, bias, activation="silu")
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([2, 64, 16, 16]), torch.Size([2, 64, 16, 16]))
    """
    values = "group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope, None
    return _dispatch_norm(values, x, weight, bias, None, scale, shift, None)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
) -> Added:
    """Apply LayerNorm to residual + gate * x and return the sum too, differentiable in all tensors.

    y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) / sqrt(var + eps) * (weight + weight_offset) + bias,
    over the last axis of h = residual + gate * x.  The sum is normalised before it is rounded.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [..., cols], float32, float16 or bfloat16, on the CPU also float64; any strides.  A jagged nested tensor
            with rows of one length is accepted, too.
        residual: x's shape, any of these dtypes, independent of x's.
        weight: [cols], any of these dtypes, on x's device; None (default) for ones.  [heads, cols] for a separate
            weight per head of x [..., heads, cols].
        bias: [cols] or [heads, cols], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: one row for each sample of x, or for each of its leading axes: x.shape[:k] and the last axis,
            with axes of one element between or without ([N, cols] or [N, 1, cols] for x [N, tokens, cols]), any of
            these dtypes; None (default) for zeros.
        gate: the factor of x, shaped as scale, any of these dtypes; None (default) for ones.  Scale, shift and gate
            have one shape.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], as LayerNorm2d: parameters [C], scale, shift and gate [N, C], contiguous or channels-last.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = residual + gate * x, in the
            residual's dtype; with a layout both in x's memory format.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or no residual.
        UnsupportedShapeError: CUDA only: over 2^30 columns; over 65535 heads with separate parameters; in
            backward with such heads, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(8, 1024, dtype=torch.bfloat16, requires_grad=True)  # or with device="cuda"
        >>> residual = torch.zeros_like(x, dtype=torch.float32)
        >>> y, residual = fusednorm.add_layer_norm(x, residual)
        >>> y.dtype, residual.dtype
        (torch.bfloat16, torch.float32)
    """
    require_residual(residual, "layer_norm")
    values = "layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return Added(*_dispatch_norm(values, x, weight, bias, residual, scale, shift, gate))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
) -> Added:
    """Apply RMSNorm to residual + gate * x and return the sum too, differentiable in all tensors.

    y = dropout(act(z * (1 + scale) + shift)), z = h / sqrt(mean(h^2) + eps) * (weight + weight_offset), over the
    last axis of h = residual + gate * x.  The sum is normalised before it is rounded.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [..., cols], float32, float16 or bfloat16, on the CPU also float64; any strides.  A jagged nested tensor
            with rows of one length is accepted, too.
        residual: x's shape, any of these dtypes, independent of x's.
        weight: [cols], any of these dtypes, on x's device; None (default) for ones.  [heads, cols] for a separate
            weight per head of x [..., heads, cols].
        eps: added to the mean of squares; at least 0 and finite; default 1e-6.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: one row for each sample of x, or for each of its leading axes: x.shape[:k] and the last axis,
            with axes of one element between or without ([N, cols] or [N, 1, cols] for x [N, tokens, cols]), any of
            these dtypes; None (default) for zeros.
        gate: the factor of x, shaped as scale, any of these dtypes; None (default) for ones.  Scale, shift and gate
            have one shape.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], as LayerNorm2d: parameters [C], scale, shift and gate [N, C], contiguous or channels-last.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = residual + gate * x, in the
            residual's dtype; with a layout both in x's memory format.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or no residual.
        UnsupportedShapeError: CUDA only: over 2^30 columns; over 65535 heads with separate parameters; in
            backward with such heads, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(8, 1024, dtype=torch.bfloat16, requires_grad=True)  # or with device="cuda"
        >>> residual = torch.zeros_like(x, dtype=torch.float32)
        >>> y, residual = fusednorm.add_rms_norm(x, residual)
        >>> y.dtype, residual.dtype
        (torch.bfloat16, torch.float32)
    """
    require_residual(residual, "rms_norm")
    values = "rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return Added(*_dispatch_norm(values, x, weight, None, residual, scale, shift, gate))


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
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """Apply GroupNorm to x + residual and return the sum too, differentiable in all tensors.

    y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) / sqrt(var + eps) * weight + bias, h = x + residual,
    with the mean and the biased variance of each group of C / num_groups channels in a sample.  The sum is
    normalised before it is rounded.

    CPU tensors are computed by torch's functions, at about torch's speed and also without Triton; CUDA tensors by
    this library's kernels.  Statistics and sums are float32 (float64 for a float64 x), and the result is rounded
    once.

    Args:
        x: [N, C, *spatial], float32, float16 or bfloat16, on the CPU also float64; any strides.
        residual: x's shape, any of these dtypes and layouts.
        num_groups: number of groups, an int that divides C.
        weight: [C], any of these dtypes, on x's device; None (default) for ones.
        bias: [C], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        scale, shift: [N, C], any of these dtypes; None (default) for zeros.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.  The mask
            depends on the layout of x.
        seed: int64, determines the mask of dropout; None (default) draws a seed from torch's CPU generator.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = x + residual, in x's dtype and
            layout.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, no residual, or num_groups does not divide C.
        UnsupportedShapeError: CUDA only: the call needs 2^31 programs or more.
        ModuleNotFoundError: a CUDA tensor without Triton installed.

    Examples:
        >>> import torch, fusednorm
        >>> x = torch.randn(2, 64, 16, 16, requires_grad=True)  # or with device="cuda"
        >>> y, residual_out = fusednorm.add_group_norm(x, torch.ones_like(x), 32, activation="silu")
        >>> y.shape, residual_out.shape
        (torch.Size([2, 64, 16, 16]), torch.Size([2, 64, 16, 16]))
    """
    require_residual(residual, "group_norm")
    values = "group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope, None
    return Added(*_dispatch_norm(values, x, weight, bias, residual, scale, shift, None))


_PLAIN = NormOptions("")[3:6], NormOptions("").negative_slope
"""The defaults of weight_offset, activation and dropout, and that of negative_slope: those of a plain norm."""


def _dispatch_norm(values: OptionValues, *tensors: Any) -> tuple[Tensor, Any]:
    """Compute a norm, after the addition of a residual if there is one; return y and the sum.

    `values` are the fields of `NormOptions`, and `tensors` those of `NormInputs`, in order.  Without a
    residual the sum has no meaning.  A call that torch traces, transforms or observes goes to the registered
    operator, any other one directly to its pass.
    """
    if values[4] is None:
        values = (*values[:4], "none", *values[5:])
    extension = get_extension() if HAS_TRITON and not is_compiling() else None
    if extension is not None and can_bypass_triton():
        made: tuple[Tensor, Any] | None = extension.run_differentiable(values, encode_policy(), *tensors)
        if made is not None:
            return made
        if is_replayable(values):
            _define_extension_call(extension, values)
    x, _, _, residual, *_ = tensors
    observed = is_observed(*tensors)
    if observed or x is None:
        # Also calls with an argument of another type are observed.
        check_tensors(NormInputs._fields, tensors)
    if x.is_nested:
        return compute_nested_norm(_dispatch_norm, NormOptions._make(values), NormInputs._make(tensors))
    differentiated = not observed and is_differentiated(*tensors)
    if x.is_cpu and not observed and residual is None and (values[3:6], values[7]) == _PLAIN and x.numel():
        norm = (
            plain_norms.try_torch_norm(values, tensors, differentiated)
            if select_library(values[0], x) is cpu
            else None
        )
        if norm is not None:
            return norm, None
    options = NormOptions._make(values)
    if not (observed or differentiated):
        replayed = _try_replay(options, tensors, stats=False)
        if replayed is not None:
            return replayed.y, replayed.residual_out
    if options.dropout and options.seed is None:
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        options = options._replace(seed=seed)
    if observed or not (x.is_cuda or x.is_cpu):
        try_register_shardings()
        run = getattr(torch.ops.fusednorm, options.op)
        inputs: NormInputs = NormInputs._make(tensors)
        y, _, _, residual_out = run(*list_operator_arguments(inputs, options.operator_arguments))
        return y, residual_out
    if differentiated:
        y, residual_out = _apply_norm(options, *tensors)
        return y, residual_out
    result = run_forward(select_library(options.op, x), options, NormInputs._make(tensors))
    return result.y, result.residual_out


def select_library(op: str, x: Tensor) -> Any:
    """Return the module whose functions compute the passes of `op` on x's device.

    Raises:
        ModuleNotFoundError: the kernels would compute it, but Triton is not installed.
    """
    if x.is_cpu:
        return cpu
    if not HAS_TRITON:
        raise make_missing_triton_error(f"{op} of a tensor on {x.device}")
    return _select_kernel_passes(op)


def _select_kernel_passes(op: str) -> Any:
    """Return the module that computes an operation's passes by the kernels."""
    return group_norm_passes if op == "group_norm" else layer_norm_passes


def _try_replay(options: NormOptions, tensors: tuple[Any, ...], stats: bool) -> Forward | None:
    """Compute a call by repeating the recorded launches of an earlier call like it; None if that is not possible.

    Two calls are alike if their options, and the dtypes, shapes and strides of their tensors, are equal: see
    `launch.replay_cache`.
    """
    if not HAS_TRITON or (tensors[0].is_cpu and not INTERPRETED) or not is_replayable(options):
        return None
    replayed: Forward | None = _select_kernel_passes(options.op).FORWARD.try_replay(tensors, (options, None, stats))
    return replayed


def _define_extension_call(extension: Any, values: OptionValues) -> None:
    """Allow the host extension, which is compiled C++ code, to make later differentiable calls with these options.

    It makes them from the forward and backward passes that it has recorded.  Options without a hash, which the
    checks refuse later, are ignored.
    """
    passes, options = _select_kernel_passes(values[0]), NormOptions._make(values)
    forward = ((options, None, stats) for stats in (True, False))
    backward = ((options, parameter_gradients) for parameter_gradients in (True, False))
    numbers = passes.FORWARD.extension_number, passes.BACKWARD.extension_number
    try:
        extension.define_differentiable(options, numbers[0], *forward, numbers[1], *backward)
    except TypeError:  # An option without a hash, which the checks refuse.
        return


def _compute_gradients(
    options: NormOptions,
    saved: tuple[Any, ...],
    dy: Tensor | None,
    dresidual_out: Tensor | None,
    parameter_gradients: bool,
) -> Backward:
    """Compute the gradients of a differentiable call, for autograd or for the host extension.

    The extension calls this function for a call that it made itself, but whose backward pass it has not
    recorded.

    `saved` is the inputs of the forward pass, then mean and rstd.
    """
    return compute_input_gradients(
        partial(_select_and_run_backward, options, parameter_gradients), saved, dy, dresidual_out
    )


def _select_and_run_backward(options: NormOptions, parameter_gradients: bool, inputs: BackwardInputs) -> Backward:
    """Run the backward pass directly, or by its registered operator if torch must see the pass.

    Torch must see it if the pass is traced, transformed or observed, or is itself differentiated.
    """
    if is_observed(*inputs) or torch.is_grad_enabled():
        return run_backward_operator(options, inputs)
    library = select_library(options.op, inputs.x)
    return run_backward(library, options, inputs, parameter_gradients=parameter_gradients)


class _NormFunction(torch.autograd.Function):
    """The autograd function of calls that bypass torch's dispatcher and thus the registered operators."""

    @staticmethod
    def forward(ctx: Any, options: NormOptions, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        """Repeat a recorded forward pass or run one, and save its inputs and statistics for the backward pass."""
        result = _try_replay(options, tensors, stats=True)
        if result is None:
            library = select_library(options.op, tensors[0])
            result = run_forward(library, options, NormInputs._make(tensors), stats=True)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, result.mean, result.rstd)
        return result.y, result.residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None) -> tuple[Any, ...]:
        _, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        return None, *_compute_gradients(ctx.options, ctx.saved_tensors, dy, dresidual_out, of_weight or of_bias)


# `apply` without its handling of functorch, which is never active here.
_apply_norm: Callable[..., Any] = super(torch.autograd.Function, _NormFunction).apply


if HAS_TRITON:
    set_gradient_function(_compute_gradients)
