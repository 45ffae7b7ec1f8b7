"""LayerNorm and RMSNorm, forward and backward: check, allocate, plan, launch."""

from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.arrays import FLOAT8, Array
from fusednorm.arguments.checks import ActivationName, check_out_dtype
from fusednorm.arguments.inputs import BackwardInputs, NormInputs, list_roles
from fusednorm.arguments.options import NormOptions, OptionValues, is_replayable
from fusednorm.errors import KernelInputError
from fusednorm.launch.replay import ReplayablePass
from fusednorm.launch.run import run_launches
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.checks import check_rows
from fusednorm.ops.layer_norm.choice import plan_backward, plan_forward
from fusednorm.ops.layer_norm.outputs import declare_backward_outputs, declare_forward_outputs
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_inputs, name_dtype
from fusednorm.tensors.outputs import describe_results, places

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
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute y = dropout(act((h - mean) * rstd * (weight + weight_offset) + bias)) over the last axis.

    h = x + residual.

    Statistics and every intermediate are float32; the variance is computed about a pivot within the range of the
    row's values, so a mean far from zero causes no cancellation.  A row's bits do not depend on the other rows.

    Args:
        x: [..., cols], float32, float16 or bfloat16, CUDA; the last axis contiguous.  Rows are one constant
            stride apart; or the heads of a token [heads, cols] are contiguous and tokens one constant stride apart,
            like the queries in a fused q, k, v.
        weight: [cols], any of these dtypes, or None for ones; [heads, cols] for a separate weight per head of x.
        bias: as weight, or None for zeros.
        eps: added to the variance; at least 0 and finite.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; the sum is float32.
        residual: x's shape, any of these dtypes, independent of x's.  h is summed in float32, normalised
            unrounded and returned rounded to the residual's dtype: a float32 residual stream stays float32.
        activation: none, relu, silu, gelu (erf) or gelu_tanh.
        dropout: probability of a zero, in [0, 1).
        seed: int64, required with dropout; the same seed gives the same mask in backward.
        out_dtype: y's dtype, float32, float16, bfloat16 or float8_e4m3fn; x's when None.  Each float8 row is
            divided by its own scale, max(largest |y| / 448, 2^-126); float8 needs compute capability 8.9.
        stats: also return mean and rstd, float32 [...].
        out: tensors to write results to, contiguous, each with its result's shape and dtype, in memory of its own;
            results for fields that are None are allocated.

    Returns:
        Forward: y [..., cols] contiguous; mean and rstd with `stats`; residual_out with a residual; scale, float32
        [...], with a float8 y: y * scale is the result of the formula.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value.
        UnsupportedShapeError: strides that no kernel handles (nothing is copied to make them fit); over 65535 heads
            or 2^30 columns.

    Traffic: `traffic.compute_forward_bytes`: x, y, residual and residual_out once each.  Rows longer than one tile
    are read a second time from L1 or L2; for a float8 y rows beyond 16384 columns are read a second and third time.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; partial moments merged as in Chan,
    Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, seed
    return _run_forward(values, (x, weight, bias, residual, None, None), out_dtype, stats, out)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """Compute y = dropout(act(h * rstd * (weight + weight_offset))) over the last axis.

    rstd = 1 / sqrt(mean(h^2) + eps), h = x + residual.

    Everything else is as in `layer_norm_forward`; there is no bias and no mean.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, seed
    return _run_forward(values, (x, weight, None, residual, None, None), out_dtype, stats, out)


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
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * w.

    w is weight + weight_offset.  dz is the gradient of the affine step's output; dweight = sum(dz * x_hat) and
    dbias = sum(dz) over the rows.  Sums are float32 in fixed order, without atomics: every run on a device gives
    the same bits.

    Args:
        dy: gradient of y, x's shape, with strides that x may have, float32, float16 or bfloat16.
        x, weight, bias, eps, weight_offset, residual, activation, dropout, seed: the arguments of the forward pass.
        mean, rstd: the statistics from the forward pass, float32 [...], both or neither; computed again if absent.
        dresidual_out: x's shape, any of these dtypes; the gradient of residual_out, added to dx.
        parameter_gradients: whether dweight and dbias are wanted; without them there is less to compute.
        out: tensors to write the gradients to, as in the forward pass.

    Returns:
        Backward: dx [..., cols] contiguous in x's dtype; dresidual, the same gradient in the residual's dtype, or
        dx itself if the dtypes are equal; dweight in weight's dtype if weight is not None, and dbias likewise, both
        only if they are wanted.

    Raises:
        KernelInputError: a wrong shape, dtype, device or value, or one statistic without the other.
        UnsupportedShapeError: strides that no kernel handles; over 2^30 columns; or over 8192 columns if heads have
            parameters of their own or rows need two strides.

    Traffic: `traffic.compute_backward_bytes`: dy, x and dx once each, also a residual, and a dresidual of another
    dtype than dx; for rows too long for a tile, dy and x twice.

    Source: the derivative of `layer_norm_forward`; see docs/numerics.md.
    """
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, seed
    tensors = x, weight, bias, residual, None, None, mean, rstd, dy, dresidual_out
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
    activation: ActivationName = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """Compute dx = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * w, x_hat = h * rstd.

    Everything else is as in `layer_norm_backward`; there is no bias and no mean.
    """
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, seed
    tensors = x, weight, None, residual, None, None, None, rstd, dy, dresidual_out
    return _run_backward(values, tensors, parameter_gradients, out)


def _run_forward(
    values: OptionValues, tensors: tuple[Any, ...], out_dtype: torch.dtype | None, stats: bool, out: Forward | None
) -> Forward:
    """Run the forward pass; `values` are those of `NormOptions`, `tensors` those of `NormInputs`."""
    kind = values, out_dtype, stats
    may_repeat = is_replayable(values)
    repeated = FORWARD.replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = NormInputs._make(tensors), NormOptions._make(values).validate()
    arrays, named = describe_inputs(inputs)
    rows = check_rows(options, arrays)
    y_dtype = arrays.x.dtype
    if out_dtype is not None:
        y_dtype = name_dtype(out_dtype)
        check_out_dtype(y_dtype, FLOAT8)
    outputs = declare_forward_outputs(arrays.residual, y_dtype, stats, options.is_rms)
    x = inputs.x
    result = places(Forward, outputs, x, out)
    if x.numel():
        written: Forward[Array] = Forward(*describe_results(outputs, result, arrays.x, out, named))
        call = LayerNormForwardCall(**rows, options=options, out=written)
        launches = plan_forward(call)
        run_launches(x.device, launches, named)
        if may_repeat:
            FORWARD.record(launches, outputs, named, inputs, kind)
    return result


def _run_backward(
    values: OptionValues, tensors: tuple[Any, ...], parameter_gradients: bool, out: Backward | None
) -> Backward:
    """Run the backward pass; `values` are those of `NormOptions`, `tensors` those of `BackwardInputs`."""
    kind = values, parameter_gradients
    may_repeat = is_replayable(values)
    repeated = BACKWARD.replay(tensors, kind, out) if may_repeat else None
    if repeated is not None:
        return repeated
    inputs, options = BackwardInputs._make(tensors), NormOptions._make(values)
    if not options.is_rms and (inputs.mean is None) != (inputs.rstd is None):
        raise KernelInputError("mean and rstd must be passed together, got one of them")
    options = options.validate()
    arrays, named = describe_inputs(inputs)
    rows = check_rows(options, arrays)
    parameters = (arrays.weight, arrays.bias) if parameter_gradients else (None, None)
    outputs = declare_backward_outputs(arrays.x, *parameters, arrays.residual)
    x = inputs.x
    result = places(Backward, outputs, x, out)
    if x.numel():
        written: Backward[Array] = Backward(*describe_results(outputs, result, arrays.x, out, named))
        launches = plan_backward(LayerNormBackwardCall(**rows, options=options, out=written))
        run_launches(x.device, launches, named)
        if may_repeat:
            BACKWARD.record(launches, outputs, named, inputs, kind)
    else:
        for gradient in (result.dweight, result.dbias):
            if gradient is not None:
                gradient.zero_()
    return result
