"""The oracle: every operation of the library in plain torch, on any device and in either precision.

It follows the formulas literally, to be readable and trustworthy, not fast.  Sums are computed in `precision`:
float64 if requested or if x is float64, otherwise float32.  Three decisions apply here and to every kernel:

- y = dropout(act(x_hat * (weight + weight_offset) + bias)), and dy of the backward pass is the gradient of this y;
  scale and shift of a sample are applied before act: with them act(z * (1 + scale) + shift) replaces act(z) there;
- with a residual the statistics are those of h = residual + gate * x as summed in `precision`, *before* it is
  rounded for `residual_out`; the backward pass computes h again in the same way; without a gate, it is 1;
- dresidual is the gradient of h, to which `dresidual_out`, the gradient of `residual_out`, is added; dx is gate
  times this gradient, so without a gate dresidual is dx itself unless its dtype differs.

y has `out_dtype` or else x's dtype, dx x's, residual_out and dresidual the residual's (for GroupNorm x's), dweight
weight's, dbias bias's; mean and rstd have dtype `precision`.  Rows in float8_e4m3fn are quantised as in
`reference.float8`, with a scale of dtype `precision` too; a group has no such scale.

All six functions are in one file so that their two formulas, forward and backward, are written once.
"""

import torch
from torch import Tensor

from fusednorm.arguments.checks import ActivationName
from fusednorm.arguments.inputs import NormInputs, has_own_gradient
from fusednorm.arguments.options import NormOptions
from fusednorm.reference.checks import check_float, check_optional_tensor, check_result_dtype
from fusednorm.reference.dropout import compute_dropout_mask
from fusednorm.reference.float8 import quantise_rows
from fusednorm.reference.norm_views import NormView, check_and_view_groups, check_and_view_rows
from fusednorm.results import Backward, Forward
from fusednorm.tensors.activations import activation_of
from fusednorm.tensors.arrays import FLOAT8
from fusednorm.tensors.channel_rows import compute_backward_over_channels, compute_forward_over_channels
from fusednorm.tensors.layouts import convert_to_layout


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
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    precision: torch.dtype | None = None,
) -> Forward:
    """Compute y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) * rstd * (weight + weight_offset) + bias.

    h = residual + gate * x, normalised over the last axis.

    Dropout's row is the index of the row in x flattened to [rows, cols], its position the column.

    Args:
        x: [..., cols], float32, float16, bfloat16 or float64, any strides.
        weight: [cols], any of these dtypes, or None for ones; or [heads, cols] for x [..., heads, cols].
        bias: like weight, or None for zeros.
        eps, weight_offset: added to the variance, at least 0 and finite; and to the weight, 0 or 1.
        residual: in x's shape, any of these dtypes.
        scale, shift, gate: of each sample, [*x.shape[:k], cols] with axes of one element between or without, any of
            these dtypes; None for zeros, and ones in place of gate.  A gate needs a residual.
        activation, negative_slope: one of `checks.ACTIVATIONS`, and leaky_relu's factor of negative values.
        dropout: probability of a zero, in [0, 1).
        seed: int64, required with dropout.
        layout: None, or "nchw" for x [N, C, *spatial] and a norm over C; results have x's memory format.
        out_dtype: y's dtype, any of these or float8_e4m3fn; x's when None.
        stats: whether to return mean and rstd, [...] each.
        precision: torch.float32 or torch.float64.

    Returns:
        Forward: y and residual_out contiguous.

    Raises:
        KernelInputError: the last axis is empty, a tensor has a wrong shape, dtype or device, or eps, activation,
            dropout or seed is invalid.
    """
    if layout is not None:
        return compute_forward_over_channels(layer_norm_forward, locals())
    check_result_dtype(out_dtype, float8=True)
    view = check_and_view_rows(
        x, weight, bias, weight_offset, residual, scale, shift, gate, centre=True, precision=precision
    )
    options = NormOptions("layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope).validate()
    return _compute_forward(view, x, weight, bias, residual, options, out_dtype, stats)


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
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    precision: torch.dtype | None = None,
) -> Forward:
    """Compute y = dropout(act(z * (1 + scale) + shift)), z = h * rstd * (weight + weight_offset).

    rstd = 1 / sqrt(mean(h^2) + eps).

    Everything else is as in `layer_norm_forward`.
    """
    if layout is not None:
        return compute_forward_over_channels(rms_norm_forward, locals())
    check_result_dtype(out_dtype, float8=True)
    view = check_and_view_rows(
        x, weight, None, weight_offset, residual, scale, shift, gate, centre=False, precision=precision
    )
    options = NormOptions("rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope).validate()
    return _compute_forward(view, x, weight, None, residual, options, out_dtype, stats)


def group_norm_forward(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    precision: torch.dtype | None = None,
) -> Forward:
    """Compute y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) * rstd * weight + bias.

    h = x + residual; mean and rstd are those of groups.

    Dropout's row is the sample; its position is the offset inside the sample in *memory* order, channel first
    for a contiguous x and channel last for a channels-last x, so the two layouts have different masks.

    Args:
        x: [N, C, *spatial], contiguous or channels-last by its strides; results keep that layout.
        num_groups: divides C.
        weight, bias: [C], or None for ones and zeros.
        scale, shift: [N, C], or None for zeros: adaptive GroupNorm, an affine step per sample after the common one.
        stats: whether to return mean and rstd, [N, num_groups] each.
        eps, residual, activation, negative_slope, dropout, seed, out_dtype, precision: as for `layer_norm_forward`.

    Raises:
        KernelInputError: as `layer_norm_forward`, or the groups do not divide C, or a float8 out_dtype.
        UnsupportedShapeError: x is neither contiguous nor channels-last.
    """
    check_result_dtype(out_dtype, float8=False)
    view = check_and_view_groups(x, num_groups, weight, bias, residual, scale, shift, precision=precision)
    options = NormOptions("group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope).validate()
    return _compute_forward(view, x, weight, bias, residual, options, out_dtype, stats)


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
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    parameter_gradients: bool = True,
    precision: torch.dtype | None = None,
) -> Backward:
    """Compute dh = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out, with g = dz * w.

    w = weight + weight_offset, z = x_hat * w + bias, dz = ds * (1 + scale), ds = keep / (1 - dropout) * dy *
    act'(z * (1 + scale) + shift).  dresidual = dh, dx = gate * dh; dweight = sum(dz * x_hat) and dbias = sum(dz)
    over the rows; dscale = sum(ds * z), dshift = sum(ds) and dgate = sum(dh * x) over the rows of a sample.

    Args:
        dy: the gradient of y, in x's shape, any dtype that x may have.
        mean, rstd: [...], float32 or float64, from the forward pass; computed again unless both are passed.
        dresidual_out: the gradient of residual_out, in x's shape.
        parameter_gradients: whether dweight and dbias are wanted.
        Everything else: as in forward.

    Raises:
        KernelInputError: as in forward.
    """
    if layout is not None:
        return compute_backward_over_channels(layer_norm_backward, locals())
    view = check_and_view_rows(
        x, weight, bias, weight_offset, residual, scale, shift, gate, centre=True, precision=precision
    )
    options = NormOptions("layer_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope).validate()
    result = _compute_backward(view, dy, x, weight, bias, mean, rstd, residual, dresidual_out, options)
    return result if parameter_gradients else result._replace(dweight=None, dbias=None)


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
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    parameter_gradients: bool = True,
    precision: torch.dtype | None = None,
) -> Backward:
    """Compute dh = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out, with g = dz * w.

    Everything else is as in `layer_norm_backward`.
    """
    if layout is not None:
        return compute_backward_over_channels(rms_norm_backward, locals())
    view = check_and_view_rows(
        x, weight, None, weight_offset, residual, scale, shift, gate, centre=False, precision=precision
    )
    options = NormOptions("rms_norm", 0, eps, weight_offset, activation, dropout, seed, negative_slope).validate()
    result = _compute_backward(view, dy, x, weight, None, None, rstd, residual, dresidual_out, options)
    return result if parameter_gradients else result._replace(dweight=None, dbias=None)


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: ActivationName = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    precision: torch.dtype | None = None,
) -> Backward:
    """Compute the gradients of GroupNorm's inputs as `layer_norm_backward`, with means over groups.

    dweight and dbias are sums over samples and positions.

    With scale or shift [N, C], z = (x_hat * weight + bias) * (1 + scale) + shift; dscale and dshift are sums over
    positions.
    Dropout's mask is that of `group_norm_forward` for x's layout, independent of dy's layout.
    """
    view = check_and_view_groups(x, num_groups, weight, bias, residual, scale, shift, precision=precision)
    options = NormOptions("group_norm", num_groups, eps, 0.0, activation, dropout, seed, negative_slope).validate()
    result = _compute_backward(view, dy, x, weight, bias, mean, rstd, residual, dresidual_out, options)
    return result if parameter_gradients else result._replace(dweight=None, dbias=None)


def _compute_forward(
    view: NormView,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    options: NormOptions,
    out_dtype: torch.dtype | None,
    stats: bool,
) -> Forward:
    """Compute the forward pass of any of the three norms, over tensors as the view describes them."""
    h = _add_residual(view, x, residual)
    centred, mean, rstd = _compute_statistics(view, h, options.eps)
    z = _apply_modulation(view, _apply_affine(view, centred * rstd, weight, bias))
    y = activation_of(options.activation, options.negative_slope).apply(z)
    if options.dropout:
        y = y * _compute_dropout_factors(view, options, x.device)
    y_scale = None
    if out_dtype == FLOAT8:
        y, y_scale = quantise_rows(y)
    return Forward(
        y=_convert_result(view, x, y, out_dtype or x.dtype),
        mean=mean.reshape(view.statistics_shape) if stats and mean is not None else None,
        rstd=rstd.reshape(view.statistics_shape) if stats else None,
        residual_out=None if residual is None else _convert_result(view, x, h, view.residual_dtype),
        y_scale=None if y_scale is None else y_scale.reshape(view.statistics_shape),
    )


def _compute_backward(
    view: NormView,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    options: NormOptions,
) -> Backward:
    """Compute the backward pass of any of the three norms, over tensors as the view describes them."""
    work, scale, shift, gate = view.work_dtype, view.scale, view.shift, view.gate
    check_float("dy", dy)
    check_optional_tensor("dy", dy, x)
    check_optional_tensor("dresidual_out", dresidual_out, x)
    check_optional_tensor("mean", mean, x, view.statistics_shape)
    check_optional_tensor("rstd", rstd, x, view.statistics_shape)
    h = _add_residual(view, x, residual)
    if rstd is None or (view.subtracts_mean and mean is None):
        centred, _, inverse = _compute_statistics(view, h, options.eps)
    else:
        aligned = tuple(1 if axis in view.axes else size for axis, size in enumerate(view.shape))
        inverse = rstd.to(work).reshape(aligned)
        centred = h if mean is None else h - mean.to(work).reshape(aligned)

    xhat = centred * inverse
    dz = dy.to(work).reshape(view.shape)
    if options.dropout:
        dz = dz * _compute_dropout_factors(view, options, x.device)
    if options.activation != "none":
        z = _apply_modulation(view, _apply_affine(view, xhat, weight, bias))
        dz = dz * activation_of(options.activation, options.negative_slope).derivative(z)

    dshift = None if shift is None else _sum_sample_gradient(view, dz, shift)
    dscale = (
        None if scale is None else _sum_sample_gradient(view, dz * _apply_affine(view, xhat, weight, bias), scale)
    )
    if scale is not None:
        dz = dz * _compute_scale_factors(view, scale)
    g = dz if weight is None else dz * _compute_weight_factors(view, weight)
    dh = g - xhat * (g * xhat).mean(view.axes, keepdim=True)
    if view.subtracts_mean:
        dh = dh - g.mean(view.axes, keepdim=True)
    dh = dh * inverse
    if dresidual_out is not None:
        dh = dh + dresidual_out.to(work).reshape(view.shape)
    dx = _convert_result(view, x, dh if gate is None else dh * _broadcast_sample_parameter(view, gate), x.dtype)
    dresidual = dx
    if has_own_gradient(options.op, NormInputs(x, residual=residual, gate=gate)):
        dresidual = _convert_result(view, x, dh, view.residual_dtype)
    return Backward(
        dx=dx,
        dweight=None if weight is None else _sum_parameter_gradient(view, dz * xhat, weight),
        dbias=None if bias is None else _sum_parameter_gradient(view, dz, bias),
        dresidual=None if residual is None else dresidual,
        dscale=dscale,
        dshift=dshift,
        dgate=None if gate is None else _sum_sample_gradient(view, dh * x.to(work).reshape(view.shape), gate),
    )


def _sum_sample_gradient(view: NormView, terms: Tensor, parameter: Tensor) -> Tensor:
    return terms.sum(view.sample_axis).reshape(parameter.shape).to(parameter.dtype, copy=True)


def _add_residual(view: NormView, x: Tensor, residual: Tensor | None) -> Tensor:
    h = x.to(view.work_dtype).reshape(view.shape)
    if view.gate is not None:
        h = h * _broadcast_sample_parameter(view, view.gate)
    return h if residual is None else h + residual.to(view.work_dtype).reshape(view.shape)


def _compute_statistics(view: NormView, h: Tensor, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute h - mean, the mean and the reciprocal standard deviation; both statistics broadcast against h.

    For RMSNorm the first result is h itself, and the mean is None.
    """
    centred, mean = h, None
    if view.subtracts_mean:
        rounded = h.mean(view.axes, keepdim=True)
        centred = h - rounded
        # The rounding error of a large mean is large compared with the deviations.
        rest = centred.mean(view.axes, keepdim=True)
        centred, mean = centred - rest, rounded + rest
    variance = centred.square().mean(view.axes, keepdim=True)
    return centred, mean, torch.rsqrt(variance + eps)


def _apply_affine(view: NormView, xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute xhat * (weight + weight_offset) + bias; a weight or bias of None is left out."""
    z = xhat
    if weight is not None:
        z = z * _compute_weight_factors(view, weight)
    if bias is not None:
        z = z + bias.to(xhat.dtype).reshape(view.parameter_shape)
    return z


def _apply_modulation(view: NormView, z: Tensor) -> Tensor:
    """Compute z * (1 + scale) + shift with the view's scale and shift of each sample, if there are any."""
    if view.scale is not None:
        z = z * _compute_scale_factors(view, view.scale)
    if view.shift is not None:
        z = z + _broadcast_sample_parameter(view, view.shift)
    return z


def _compute_scale_factors(view: NormView, scale: Tensor) -> Tensor:
    """Compute the factors of a sample's channels, in a broadcastable shape."""
    return 1.0 + _broadcast_sample_parameter(view, scale)


def _broadcast_sample_parameter(view: NormView, parameter: Tensor) -> Tensor:
    """Make the parameter of each sample broadcastable."""
    return parameter.to(view.work_dtype).reshape(view.sample_shape)


def _compute_weight_factors(view: NormView, weight: Tensor) -> Tensor:
    """Compute the factors of x_hat, in a broadcastable shape."""
    return weight.to(view.work_dtype).reshape(view.parameter_shape) + view.weight_offset


def _compute_dropout_factors(view: NormView, options: NormOptions, device: torch.device) -> Tensor:
    """Compute dropout's multiplier of each element: 0, or 1 / (1 - dropout)."""
    keep = compute_dropout_mask(options.seed or 0, view.rows, view.positions, options.dropout, device)
    return view.convert_mask(keep).to(view.work_dtype) / (1.0 - options.dropout)


def _sum_parameter_gradient(view: NormView, terms: Tensor, parameter: Tensor) -> Tensor:
    return terms.sum(view.parameter_axes).reshape(parameter.shape).to(parameter.dtype, copy=True)


def _convert_result(view: NormView, x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a result to x's shape and `dtype`, in the memory layout of the view."""
    # Not a view, which torch would not change in place as the result of an autograd function; and not written into
    # an empty tensor, since under vmap x may be one tensor and its results several.
    return convert_to_layout(values.reshape(x.shape), view.channels_last).to(dtype, copy=True)
