"""LayerNorm and RMSNorm of rows with torch's kernels."""

from typing import Any

import torch
from torch import Tensor

from fusednorm.cpu import fallback_passes
from fusednorm.cpu.epilogue import activate_, backpropagate_activation_
from fusednorm.cpu.gradients import ChunkedRowGradients
from fusednorm.cpu.supported_arguments import (
    add_residual,
    has_float_tensors,
    has_torch_options,
    is_valid_offset,
    make_ones,
    to_float32,
)
from fusednorm.results import Backward, Forward

_LONGEST = 2**16
"""The most columns of an RMSNorm row; torch adds squares in a few float32 sums, so errors grow with length."""

_backward_of_torch: Any = torch.ops.aten.native_layer_norm_backward


def can_compute(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
) -> bool:
    """Return whether torch's kernels compute this call: see `fusednorm.cpu`.

    Not for rows of one value: their gradient is 0, but torch's is a rounding error times rstd.
    """
    shape = x.shape
    return (
        has_torch_options(eps, activation, dropout)
        and has_float_tensors(shape, x, residual)
        and has_float_tensors(shape[-1:], weight, bias)
        and is_valid_offset(weight_offset, weight)
        and bool(shape)
        and shape[-1] > 1
        and x.numel() > 0
    )


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
    stats: bool = False,
) -> Forward:
    """See `fusednorm.reference.layer_norm_forward`."""
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    if not can_compute(x, weight, bias, residual, dropout=dropout, **options):
        more: dict[str, Any] = {"residual": residual, "dropout": dropout, "seed": seed, "stats": stats}
        return fallback_passes.compute_forward("layer_norm", x=x, weight=weight, bias=bias, **options, **more)
    cols, factor, shift = x.shape[-1:], _compute_weight_factor(weight, weight_offset), to_float32(bias)
    if x.dtype == torch.float32 or activation != "none" or residual is not None:
        h = add_residual(x, residual)
    else:
        h = x
        # With float32 parameters torch returns float32 statistics.
        if stats and factor is None and shift is None:
            factor = make_ones(x.shape[-1])
    y, mean, rstd = torch.native_layer_norm(h, cols, factor, shift, eps)
    return Forward(
        activate_(y, activation).to(x.dtype),
        mean.squeeze_(-1) if stats else None,
        rstd.squeeze_(-1) if stats else None,
        None if residual is None else _cast_sum(h, residual),
    )


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
    stats: bool = False,
) -> Forward:
    """See `fusednorm.reference.rms_norm_forward`."""
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    if (
        x.ndim == 0
        or x.shape[-1] > _LONGEST
        or not can_compute(x, weight, None, residual, dropout=dropout, **options)
    ):
        more: dict[str, Any] = {"residual": residual, "dropout": dropout, "seed": seed, "stats": stats}
        return fallback_passes.compute_forward("rms_norm", x=x, weight=weight, **options, **more)
    h = add_residual(x, residual)
    cols = x.shape[-1]
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    rstd = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / cols).rsqrt_()
    factor = _compute_weight_factor(weight, weight_offset)
    y = (h * rstd).contiguous()
    if factor is not None:
        y.mul_(factor)
    return Forward(
        activate_(y, activation).to(x.dtype),
        None,
        rstd.squeeze_(-1) if stats else None,
        None if residual is None else _cast_sum(h, residual),
    )


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
) -> Backward:
    """See `fusednorm.reference.layer_norm_backward`; without saved statistics `fallback` computes the call."""
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    of_x = x.shape[:-1]
    can_compute_call = (
        can_compute(x, weight, bias, residual, dropout=dropout, **options)
        and has_float_tensors(x.shape, dy, dresidual_out)
        and _has_valid_statistics(of_x, mean, rstd)
    )
    if not can_compute_call or mean is None or rstd is None:
        sums: dict[str, Any] = {"residual": residual, "dresidual_out": dresidual_out}
        sums |= {"dropout": dropout, "seed": seed, "parameter_gradients": parameter_gradients}
        sums |= {"x": x, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd}
        return fallback_passes.compute_backward("layer_norm", dy=dy, **options, **sums)
    of_weight, of_bias = (weight, bias) if parameter_gradients else (None, None)
    gradients = ChunkedRowGradients(x, of_weight, of_bias, residual, dresidual_out)
    factor, shift = _compute_weight_factor(weight, weight_offset), to_float32(bias)
    cols, needed = x.shape[-1:], [True, of_weight is not None, of_bias is not None]
    for piece in gradients.iterate_chunks(dy, mean, rstd):
        h, gradient, centre, inverse = piece
        if activation != "none":
            z = torch.native_layer_norm(h, cols, factor, shift, eps)[0]
            gradient = backpropagate_activation_(gradient.contiguous(), z, activation)
        gradients.write_chunk(*_backward_of_torch(gradient, h, cols, centre, inverse, factor, shift, needed))
    return gradients.get_result()


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
) -> Backward:
    """See `fusednorm.reference.rms_norm_backward`; without a saved rstd `fallback` computes the call.

    dx is LayerNorm's for a mean of zero plus rstd * mean(g), which LayerNorm's formula subtracts.
    """
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    can_compute_call = (
        can_compute(x, weight, None, residual, dropout=dropout, **options)
        and x.shape[-1] <= _LONGEST
        and has_float_tensors(x.shape, dy, dresidual_out)
        and _has_valid_statistics(x.shape[:-1], rstd)
    )
    if not can_compute_call or rstd is None:
        sums: dict[str, Any] = {"residual": residual, "dresidual_out": dresidual_out}
        sums |= {"dropout": dropout, "seed": seed, "parameter_gradients": parameter_gradients}
        sums |= {"x": x, "weight": weight, "rstd": rstd}
        return fallback_passes.compute_backward("rms_norm", dy=dy, **options, **sums)
    of_weight = weight if parameter_gradients else None
    gradients = ChunkedRowGradients(x, of_weight, None, residual, dresidual_out)
    factor = _compute_weight_factor(weight, weight_offset)
    cols, needed = x.shape[-1:], [True, of_weight is not None, False]
    of_mean = (make_ones(cols[0]) if factor is None else factor) * (1.0 / cols[0])
    for piece in gradients.iterate_chunks(dy, torch.zeros_like(rstd), rstd):
        h, gradient, zero, inverse = piece
        if activation != "none":
            z = (h * inverse).contiguous()
            if factor is not None:
                z.mul_(factor)
            gradient = backpropagate_activation_(gradient.contiguous(), z, activation)
        dx, dweight, _ = _backward_of_torch(gradient, h, cols, zero, inverse, factor, None, needed)
        dx.add_(torch.mv(gradient, of_mean).unsqueeze_(-1).mul_(inverse))
        gradients.write_chunk(dx, dweight, None)
    return gradients.get_result()


def _has_valid_statistics(shape: torch.Size, *statistics: Tensor | None) -> bool:
    return all(s is not None and s.dtype == torch.float32 and s.is_cpu and s.shape == shape for s in statistics)


def _compute_weight_factor(weight: Tensor | None, weight_offset: float) -> Tensor | None:
    """Compute the factor of x_hat in float32."""
    factor = to_float32(weight)
    return factor + weight_offset if factor is not None and weight_offset else factor


def _cast_sum(h: Tensor, residual: Tensor) -> Tensor:
    """Convert the sum to the form of results: contiguous, in the residual's dtype."""
    return h.to(residual.dtype).contiguous()
