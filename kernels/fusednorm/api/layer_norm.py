"""LayerNorm and RMSNorm, forward and backward: check, allocate, plan, launch."""

import torch
from torch import Tensor

from fusednorm.arguments.checks import (
    FLOAT8,
    Epilogue,
    check_out_dtype,
    check_parameter,
    check_statistics,
    check_tensor,
    check_weight_offset,
    checked_eps,
    has_heads,
    view_of_rows,
)
from fusednorm.arguments.outputs import places
from fusednorm.errors import KernelInputError
from fusednorm.launch.replay import Pass
from fusednorm.launch.run import run
from fusednorm.ops.layer_norm.call import BackwardCall, ForwardCall
from fusednorm.ops.layer_norm.choice import plan_backward, plan_float8, plan_forward
from fusednorm.ops.layer_norm.outputs import backward_outputs, forward_outputs
from fusednorm.results import Backward, Forward

FORWARD = Pass(Forward, like_x=2)
"""Inputs x, residual, weight and bias."""

BACKWARD = Pass(Backward, like_x=4, of_rows=2)
"""Inputs x, dy, residual, dresidual_out, mean, rstd, weight and bias."""


def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """y = dropout(act((h - mean) * rstd * (weight + weight_offset) + bias)) over the last axis, h = x + residual.

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

    Traffic: `traffic.forward_bytes`: x, y, residual and residual_out once each.  Rows longer than one tile are read
    a second time from L1 or L2; for a float8 y rows beyond 16384 columns are read a second and third time.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; partial moments merged as in Chan,
    Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    options = False, eps, weight_offset, activation, out_dtype, stats
    return _forward((x, residual, weight, bias), options, dropout, seed, out)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    out: Forward | None = None,
) -> Forward:
    """y = dropout(act(h * rstd * (weight + weight_offset))), rstd = 1 / sqrt(mean(h^2) + eps), h = x + residual.

    Everything else is as in `layer_norm_forward`; there is no bias and no mean.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    options = True, eps, weight_offset, activation, out_dtype, stats
    return _forward((x, residual, weight, None), options, dropout, seed, out)


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
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * w.

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

    Traffic: `traffic.backward_bytes`: dy, x and dx once each, also a residual, and a dresidual of another dtype
    than dx; for rows too long for a tile, dy and x twice.

    Source: the derivative of `layer_norm_forward`; see docs/numerics.md.
    """
    inputs = x, dy, residual, dresidual_out, mean, rstd, weight, bias
    options = False, eps, weight_offset, activation, parameter_gradients
    return _backward(inputs, options, dropout, seed, out)


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
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    parameter_gradients: bool = True,
    out: Backward | None = None,
) -> Backward:
    """dx = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out with g = dz * w and x_hat = h * rstd.

    Everything else is as in `layer_norm_backward`; there is no bias and no mean.
    """
    inputs = x, dy, residual, dresidual_out, None, rstd, weight, None
    options = True, eps, weight_offset, activation, parameter_gradients
    return _backward(inputs, options, dropout, seed, out)


def _forward(
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    options: tuple[bool, float, float, str, torch.dtype | None, bool],
    dropout: float,
    seed: int | None,
    out: Forward | None,
) -> Forward:
    # A seed differs between calls; without dropout it is not used, but still checked.
    may_repeat = not (dropout or seed)
    repeated = FORWARD.again(inputs, options, out) if may_repeat else None
    if repeated is not None:
        return repeated
    x, residual, weight, bias = inputs
    is_rms, eps, weight_offset, activation, out_dtype, stats = options
    epilogue = Epilogue(activation, dropout, seed)
    eps = checked_eps(eps)
    check_tensor("x", x)
    if residual is not None:
        check_tensor("residual", residual, like=x)
    own = has_heads(weight, bias)
    view = view_of_rows(own, x, residual)
    x_rows = view("x", x)
    residual_rows = None if residual is None else view("residual", residual)
    _check_parameters(weight, bias, weight_offset, own, x)

    out_dtype = out_dtype or x.dtype
    check_out_dtype(out_dtype, FLOAT8)
    outputs = forward_outputs(residual, out_dtype, stats, is_rms)
    result = places(Forward, outputs, x, out)
    if x.numel():
        call = ForwardCall(
            x=x_rows,
            weight=weight,
            bias=bias,
            eps=eps,
            residual=residual_rows,
            epilogue=epilogue,
            is_rms=is_rms,
            weight_offset=weight_offset,
            out=result,
        )
        launches = plan_forward(call) if result.scale is None else plan_float8(call)
        run(x.device, launches)
        if may_repeat:
            FORWARD.learn(launches, outputs, result, inputs, options)
    return result


def _backward(
    inputs: tuple[
        Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
    ],
    options: tuple[bool, float, float, str, bool],
    dropout: float,
    seed: int | None,
    out: Backward | None,
) -> Backward:
    may_repeat = not (dropout or seed)
    repeated = BACKWARD.again(inputs, options, out) if may_repeat else None
    if repeated is not None:
        return repeated
    x, dy, residual, dresidual_out, mean, rstd, weight, bias = inputs
    is_rms, eps, weight_offset, activation, parameter_gradients = options
    if not is_rms and (mean is None) != (rstd is None):
        raise KernelInputError("mean and rstd must be passed together, got one of them")
    epilogue = Epilogue(activation, dropout, seed)
    eps = checked_eps(eps)
    check_tensor("x", x)
    for name, tensor in (("dy", dy), ("residual", residual), ("dresidual_out", dresidual_out)):
        if tensor is not None:
            check_tensor(name, tensor, like=x)
    own = has_heads(weight, bias)
    view = view_of_rows(own, x, dy, residual, dresidual_out)
    x_rows, dy_rows = view("x", x), view("dy", dy)
    residual_rows = None if residual is None else view("residual", residual)
    outside_rows = None if dresidual_out is None else view("dresidual_out", dresidual_out)
    _check_parameters(weight, bias, weight_offset, own, x)
    check_statistics(mean, rstd, x.shape[:-1], x)

    outputs = backward_outputs(x, *(weight, bias) if parameter_gradients else (None, None), residual)
    result = places(Backward, outputs, x, out)
    if x.numel():
        call = BackwardCall(
            dy=dy_rows,
            x=x_rows,
            weight=weight,
            bias=bias,
            eps=eps,
            mean=mean,
            rstd=rstd,
            residual=residual_rows,
            dresidual_out=outside_rows,
            epilogue=epilogue,
            is_rms=is_rms,
            weight_offset=weight_offset,
            out=result,
        )
        launches = plan_backward(call)
        run(x.device, launches)
        if may_repeat:
            BACKWARD.learn(launches, outputs, result, inputs, options)
    else:
        for gradient in (result.dweight, result.dbias):
            if gradient is not None:
                gradient.zero_()
    return result


def _check_parameters(
    weight: Tensor | None, bias: Tensor | None, weight_offset: float, own: bool, x: Tensor
) -> None:
    shape = x.shape[-2:] if own else x.shape[-1:]
    check_parameter("weight", weight, shape, x)
    check_parameter("bias", bias, shape, x)
    check_weight_offset(weight_offset, weight)
