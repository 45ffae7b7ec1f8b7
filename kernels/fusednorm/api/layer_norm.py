"""LayerNorm and RMSNorm, forward and backward: check, allocate, plan, launch."""

from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.checks import ActivationName, LayoutName, check_out_dtype
from fusednorm.arguments.inputs import BackwardInputs, NormInputs, list_roles
from fusednorm.arguments.options import NormOptions, OptionValues, is_replayable
from fusednorm.errors import KernelInputError
from fusednorm.launch.execution import run_launches
from fusednorm.launch.launches import fix_row_counts
from fusednorm.launch.replay_cache import ReplayablePass
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.checks import check_layout_and_rows
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.ops.layer_norm.outputs import declare_backward_outputs, declare_forward_outputs
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_inputs, name_dtype
from fusednorm.tensors.outputs import describe_results, prepare_result_tensors

FORWARD = ReplayablePass(Forward, list_roles(NormInputs))
BACKWARD = ReplayablePass(Backward, list_roles(BackwardInputs))


def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute the forward pass of LayerNorm by one launch; autograd does not see it.

    y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) * rstd * (weight + weight_offset) + bias, rstd = 1 /
    sqrt(var + eps), h = residual + gate * x.

    Statistics and every intermediate are float32; the variance is computed about a pivot within the range of the
    row's values, so a mean far from zero causes no cancellation.  A row's bits do not depend on the other rows.

    The tensors must be CUDA tensors.  `fusednorm.reference.layer_norm_forward` computes this on the CPU, with
    these arguments except `out`; `fusednorm.layer_norm` is differentiable and takes tensors of either device.

    Args:
        x: [..., cols], float32, float16 or bfloat16; the last axis contiguous.  Rows are one constant stride
            apart; or the heads of a token [heads, cols] are contiguous and tokens one constant stride apart, like
            the queries in a fused q, k, v.
        weight: [cols], any of these dtypes; None (default) for ones.  [heads, cols] for a separate weight per head
            of x.
        bias: [cols] or [heads, cols], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        residual: x's shape, any of these dtypes, or None (default).  The float32 sum h is normalised unrounded,
            and returned in the residual's dtype.
        scale, shift: the affine step of each sample, [*x.shape[:k], cols] with axes of one element between or
            without, any of these dtypes; None (default) for zeros.  Not with parameters of each head.
        gate: the factor of x in each sample, shaped as scale, any of these dtypes; None (default) for ones.  It
            needs a residual.  Scale, shift and gate have one shape, and one stride between samples.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], contiguous or channels-last (C adjacent, positions one constant stride apart), as are all
            tensors of x's shape.  Then parameters are [C], scale and shift [N, C], statistics [N, *spatial]; a
            row is the channels of a position.  A float8 y needs channels-last tensors.
        out_dtype: y's dtype: float32, float16, bfloat16 or float8_e4m3fn; None (default) for x's.  Each float8 row
            is divided by its own scale, max(largest |y| / 448, 2^-126); float8 needs compute capability 8.9.
        stats: whether to return mean and rstd too; default False.
        out: tensors for the results, contiguous (with a layout, laid out as x), each with its result's shape and
            dtype, in memory of its own; results for fields that are None are allocated, as all are by default.

    Returns:
        Forward: y [..., cols] contiguous, or with a layout in x's memory format; mean and rstd, float32 [...], with
            `stats`; residual_out with a residual; y_scale, float32 [...], with a float8 y: y * y_scale is the
            result of the formula.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: strides that no kernel handles (nothing is copied), over 65535 heads or over 2^30
            columns.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_forward_bytes`: x, y, residual and residual_out once each.  Rows longer than one
    tile are read again from L1 or L2, as are more channels than a program holds (2048 in contiguous samples); for a
    float8 y, rows beyond 16384 columns twice.  Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450;
    moments merged as in Chan, Golub, LeVeque, 1979.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(8, 1024).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> result = passes.layer_norm_forward(x, stats=True)
        >>> result.y.shape, result.rstd.shape
        (torch.Size([8, 1024]), torch.Size([8]))
    """
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return _run_forward(values, (x, weight, bias, residual, scale, shift, gate), out_dtype, stats, out)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute the forward pass of RMSNorm by one launch; autograd does not see it.

    y = dropout(act(z * (1 + scale) + shift)), z = h * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(h^2) +
    eps), h = residual + gate * x.

    Statistics and every intermediate are float32.  A row's bits do not depend on the other rows.

    The tensors must be CUDA tensors.  `fusednorm.reference.rms_norm_forward` computes this on the CPU, with these
    arguments except `out`; `fusednorm.rms_norm` is differentiable and takes tensors of either device.

    Args:
        x: [..., cols], float32, float16 or bfloat16; the last axis contiguous.  Rows are one constant stride
            apart; or the heads of a token [heads, cols] are contiguous and tokens one constant stride apart, like
            the queries in a fused q, k, v.
        weight: [cols], any of these dtypes; None (default) for ones.  [heads, cols] for a separate weight per head
            of x.
        eps: added to the mean of squares; at least 0 and finite; default 1e-6.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        residual: x's shape, any of these dtypes, or None (default).  The float32 sum h is normalised unrounded,
            and returned in the residual's dtype.
        scale, shift: the affine step of each sample, [*x.shape[:k], cols] with axes of one element between or
            without, any of these dtypes; None (default) for zeros.  Not with parameters of each head.
        gate: the factor of x in each sample, shaped as scale, any of these dtypes; None (default) for ones.  It
            needs a residual.  Scale, shift and gate have one shape, and one stride between samples.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], contiguous or channels-last (C adjacent, positions one constant stride apart), as are all
            tensors of x's shape.  Then parameters are [C], scale and shift [N, C], statistics [N, *spatial]; a
            row is the channels of a position.  A float8 y needs channels-last tensors.
        out_dtype: y's dtype: float32, float16, bfloat16 or float8_e4m3fn; None (default) for x's.  Each float8 row
            is divided by its own scale, max(largest |y| / 448, 2^-126); float8 needs compute capability 8.9.
        stats: whether to return rstd too; default False.
        out: tensors for the results, contiguous (with a layout, laid out as x), each with its result's shape and
            dtype, in memory of its own; results for fields that are None are allocated, as all are by default.

    Returns:
        Forward: y [..., cols] contiguous, or with a layout in x's memory format; rstd, float32 [...], with `stats`;
            residual_out with a residual; y_scale, float32 [...], with a float8 y: y * y_scale is the result of the
            formula.  mean is None.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: strides that no kernel handles (nothing is copied), over 65535 heads or over 2^30
            columns.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_forward_bytes`: x, y, residual and residual_out once each.  Rows longer than one
    tile are read again from L1 or L2, as are more channels than a program holds (2048 in contiguous samples); for a
    float8 y, rows beyond 16384 columns twice.  Source: Zhang, Sennrich: Root Mean Square Layer Normalization,
    arXiv:1910.07467.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(8, 1024).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> result = passes.rms_norm_forward(x, stats=True)
        >>> result.y.shape, result.rstd.shape
        (torch.Size([8, 1024]), torch.Size([8]))
    """
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    return _run_forward(values, (x, weight, None, residual, scale, shift, gate), out_dtype, stats, out)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute the gradients of LayerNorm's inputs by one backward pass.

    dh = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out, g = dz * (weight + weight_offset), where dz
    is the gradient of the affine step's output z; dresidual = dh and dx = gate * dh.  dweight = sum(dz * x_hat) and
    dbias = sum(dz) over the rows.  With ds the gradient before the activation, dz = ds * (1 + scale), and over the
    rows of a sample dscale = sum(ds * z), dshift = sum(ds), dgate = sum(dh * x).
    Sums are float32 in fixed order, without atomics: every run on a device gives the same bits.

    The tensors must be CUDA tensors.  `fusednorm.reference.layer_norm_backward` computes this on the CPU, with
    these arguments except `out`; `fusednorm.layer_norm` is differentiable and takes tensors of either device.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16, with strides that x may have.
        x: the forward pass's x: [..., cols], float32, float16 or bfloat16; the last axis contiguous, rows (or
            tokens of contiguous heads) one stride apart.
        weight: the forward pass's: [cols] or [heads, cols], any of these dtypes, or None (default).
        bias: the forward pass's: [cols] or [heads, cols], any of these dtypes, or None (default).
        eps: added to the variance; at least 0 and finite; default 1e-5.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        mean, rstd: the forward pass's statistics, float32 [...], both or neither; None (default) computes them
            again.
        residual: the forward pass's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of residual_out, added to dh: x's shape, any of these dtypes; None (default) for
            zeros.
        scale, shift, gate: the forward pass's, or None (default).
        activation, negative_slope: the forward pass's; defaults "none" and 0.01.
        dropout, seed: the forward pass's; defaults 0.0 and None.
        layout: the forward pass's; default None.
        parameter_gradients: whether to compute dweight and dbias; default True.
        out: tensors for the gradients, contiguous (with a layout, laid out as x), with their shapes and dtypes, in
            memory of their own; fields that are None are allocated.

    Returns:
        Backward: dx [..., cols] contiguous in x's dtype, or with a layout in x's memory format; dresidual in the
            residual's dtype, dx itself if the dtypes are equal and there is no gate; dweight in weight's dtype if
            weight is not None, and dbias likewise, both only with `parameter_gradients`; dscale, dshift and dgate
            of a scale, shift and gate.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or one statistic without the other.
        UnsupportedShapeError: strides that no kernel handles; over 2^30 columns; with separate parameters per
            head or rows of two strides, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_backward_bytes`: dy, x and dx once each, also a residual, and a dresidual of
    its own; for rows too long for a tile, and more channels than a program holds, dy and x twice.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(8, 1024).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> gradients = passes.layer_norm_backward(torch.ones_like(x), x, torch.ones_like(x[0]))
        >>> gradients.dx.shape, gradients.dweight.shape
        (torch.Size([8, 1024]), torch.Size([1024]))
    """
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    tensors = x, weight, bias, residual, scale, shift, gate, mean, rstd, dy, dresidual_out
    return _run_backward(values, tensors, parameter_gradients, out)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: LayoutName | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute the gradients of RMSNorm's inputs by one backward pass.

    dh = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out, g = dz * (weight + weight_offset), x_hat = h * rstd,
    where dz is the gradient of z = x_hat * (weight + weight_offset); dresidual = dh and dx = gate * dh.  dweight =
    sum(dz * x_hat) over the rows.  With ds the gradient before the activation, dz = ds * (1 + scale), and over the
    rows of a sample dscale = sum(ds * z), dshift = sum(ds), dgate = sum(dh * x).
    Sums are float32 in fixed order, without atomics: every run on a device gives the same bits.

    The tensors must be CUDA tensors.  `fusednorm.reference.rms_norm_backward` computes this on the CPU, with these
    arguments except `out`; `fusednorm.rms_norm` is differentiable and takes tensors of either device.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16, with strides that x may have.
        x: the forward pass's x: [..., cols], float32, float16 or bfloat16; the last axis contiguous, rows (or
            tokens of contiguous heads) one stride apart.
        weight: the forward pass's: [cols] or [heads, cols], any of these dtypes, or None (default).
        eps: added to the mean of squares; at least 0 and finite; default 1e-6.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        rstd: the forward pass's, float32 [...]; None (default) computes it again.
        residual: the forward pass's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of residual_out, added to dh: x's shape, any of these dtypes; None (default) for
            zeros.
        scale, shift, gate: the forward pass's, or None (default).
        activation, negative_slope: the forward pass's; defaults "none" and 0.01.
        dropout, seed: the forward pass's; defaults 0.0 and None.
        layout: the forward pass's; default None.
        parameter_gradients: whether to compute dweight; default True.
        out: tensors for the gradients, contiguous (with a layout, laid out as x), with their shapes and dtypes, in
            memory of their own; fields that are None are allocated.

    Returns:
        Backward: dx [..., cols] contiguous in x's dtype, or with a layout in x's memory format; dresidual in the
            residual's dtype, dx itself if the dtypes are equal and there is no gate; dweight in weight's dtype if
            weight is not None, only with `parameter_gradients`; dscale, dshift and dgate of a scale, shift and
            gate.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: strides that no kernel handles; over 2^30 columns; with separate parameters per
            head or rows of two strides, over 12288 columns of a 16-bit x or 8192 of a float32 one.
        ModuleNotFoundError: Triton is not installed.

    Traffic: `traffic.compute_backward_bytes`: dy, x and dx once each, also a residual, and a dresidual of
    its own; for rows too long for a tile, and more channels than a program holds, dy and x twice.

    Examples:
        >>> import torch, fusednorm
        >>> passes = fusednorm if torch.cuda.is_available() else fusednorm.reference
        >>> x = torch.randn(8, 1024).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> gradients = passes.rms_norm_backward(torch.ones_like(x), x, torch.ones_like(x[0]))
        >>> gradients.dx.shape, gradients.dweight.shape
        (torch.Size([8, 1024]), torch.Size([1024]))
    """
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope, layout
    tensors = x, weight, None, residual, scale, shift, gate, None, rstd, dy, dresidual_out
    return _run_backward(values, tensors, parameter_gradients, out)


def _run_forward(
    values: OptionValues, tensors: tuple[Any, ...], out_dtype: torch.dtype | None, stats: bool, out: Forward | None
) -> Forward:
    """Run the forward pass of LayerNorm or RMSNorm by kernels.

    A recorded call like this one is repeated; otherwise the call is checked, planned and launched, and then
    recorded.

    `values` are the fields of `NormOptions`, and `tensors` those of `NormInputs`, in order.
    """
    kind = values, out_dtype, stats
    may_repeat = is_replayable(values)
    repeated = FORWARD.try_replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = NormInputs._make(tensors), NormOptions._make(values).validate()
    arrays, named = describe_inputs(inputs)
    rows = check_layout_and_rows(options, arrays)
    y_dtype = arrays.x.dtype
    if out_dtype is not None:
        y_dtype = name_dtype(out_dtype)
        check_out_dtype(y_dtype, FLOAT8)
    x = inputs.x
    positions_shape = None if options.layout is None else (x.shape[0], *x.shape[2:])
    outputs = declare_forward_outputs(arrays.residual, y_dtype, stats, options.is_rms, positions_shape)
    result = prepare_result_tensors(Forward, outputs, x, out)
    if x.numel():
        written: Forward[Array] = Forward(*describe_results(outputs, result, arrays.x, out, named))
        launches = plan_forward(LayerNormForwardCall(**rows, options=options, out=written))
        if options.layout is not None:
            launches = fix_row_counts(launches)
        run_launches(x.device, launches, named)
        if may_repeat:
            FORWARD.record(launches, outputs, named, inputs, kind)
    return result


def _run_backward(
    values: OptionValues, tensors: tuple[Any, ...], parameter_gradients: bool, out: Backward | None
) -> Backward:
    """Run the backward pass of LayerNorm or RMSNorm by kernels.

    A recorded call like this one is repeated; otherwise the call is checked, planned and launched, and then
    recorded.

    `values` are the fields of `NormOptions`, and `tensors` those of `BackwardInputs`, in order.
    """
    kind = values, parameter_gradients
    may_repeat = is_replayable(values)
    repeated = BACKWARD.try_replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = BackwardInputs._make(tensors), NormOptions._make(values)
    if not options.is_rms and (inputs.mean is None) != (inputs.rstd is None):
        raise KernelInputError("mean and rstd must be passed together, got one of them")
    options = options.validate()
    arrays, named = describe_inputs(inputs)
    rows = check_layout_and_rows(options, arrays)
    outputs = declare_backward_outputs(arrays.forward_inputs, parameter_gradients, options.layout is not None)
    x = inputs.x
    result = prepare_result_tensors(Backward, outputs, x, out)
    if x.numel():
        written: Backward[Array] = Backward(*describe_results(outputs, result, arrays.x, out, named))
        launches = plan_backward(LayerNormBackwardCall(**rows, options=options, out=written))
        if options.layout is not None:
            launches = fix_row_counts(launches)
        run_launches(x.device, launches, named)
        if may_repeat:
            BACKWARD.record(launches, outputs, named, inputs, kind)
    else:
        for gradient in (result.dweight, result.dbias, result.dscale, result.dshift, result.dgate):
            if gradient is not None:
                gradient.zero_()
    return result
