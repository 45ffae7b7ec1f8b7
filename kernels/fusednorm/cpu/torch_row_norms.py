"""LayerNorm and RMSNorm of rows with torch's kernels; gradients are computed in float32, in pieces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.checks import count_samples, select_modulations
from fusednorm.arguments.inputs import NormInputs, has_own_gradient
from fusednorm.cpu import fallback_passes
from fusednorm.cpu.batch_invariant.row_modulation import RowModulation, compute_sample_shape
from fusednorm.cpu.chunks import compute_chunk_rows, split_rows
from fusednorm.cpu.epilogue import activate_, backpropagate_activation_into_z_
from fusednorm.cpu.supported_arguments import (
    add_residual,
    cast_gradient,
    has_float_tensors,
    has_torch_options,
    is_valid_offset,
    make_ones,
    to_float32,
)
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward
from fusednorm.tensors.channel_rows import compute_backward_over_channels, compute_forward_over_channels

_LONGEST = 2**16
"""The most columns of an RMSNorm row; torch adds squares in a few float32 sums, so errors grow with length."""

_backward_of_torch: Any = torch.ops.aten.native_layer_norm_backward


def can_compute(
    *,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    gate: Tensor | None,
    eps: float,
    weight_offset: float,
    activation: str,
    negative_slope: float,
    dropout: float,
    bias: Tensor | None = None,
    dy: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    **others: Any,
) -> bool:
    """Return whether torch's kernels support a call over rows; if not, `fallback_passes` computes the call.

    Rows of one value are not supported: their gradient is 0, but torch's is a rounding error times rstd.  With a
    gate, and with a scale or shift of an x in 16 bits or in a backward pass, `fallback_passes` takes less time.
    """
    shape = x.shape
    return (
        gate is None
        and (scale is shift is None or (dy is None and _has_valid_modulations(x, scale, shift)))
        and has_torch_options(eps, activation, negative_slope, dropout)
        and has_float_tensors(shape, x, residual, dy, dresidual_out)
        and has_float_tensors(shape[-1:], weight, bias)
        and has_float_tensors(shape[:-1], mean, rstd)
        and all(statistic is None or statistic.dtype == torch.float32 for statistic in (mean, rstd))
        and is_valid_offset(weight_offset, weight)
        and bool(shape)
        and shape[-1] > 1
        and x.numel() > 0
    )


def _has_valid_modulations(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> bool:
    """Return whether x is float32, and scale and shift fit it."""
    modulations = select_modulations(scale, shift, None)
    if x.dtype != torch.float32 or not all(has_float_tensors(each.shape, each) for each in modulations.values()):
        return False
    try:
        count_samples(tuple(x.shape), modulations)
    except KernelInputError:
        return False
    return True


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
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    stats: bool = False,
) -> Forward:
    """Compute LayerNorm's forward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.layer_norm_forward`.
    """
    if layout is not None:
        return compute_forward_over_channels(layer_norm_forward, locals())
    if not can_compute(**locals()):
        return fallback_passes.compute_fallback_forward("layer_norm", **locals())
    cols, factor, addend = x.shape[-1:], _compute_weight_factor(weight, weight_offset), to_float32(bias)
    if x.dtype == torch.float32 or activation != "none" or residual is not None:
        h = add_residual(x, residual)
    else:
        h = x
        # With float32 parameters torch returns float32 statistics.
        if stats and factor is None and addend is None:
            factor = make_ones(x.shape[-1])
    y, mean, rstd = torch.native_layer_norm(h, cols, factor, addend, eps)
    return Forward(
        activate_(_modulate_(y, scale, shift), activation, negative_slope).to(x.dtype),
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    stats: bool = False,
) -> Forward:
    """Compute RMSNorm's forward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.rms_norm_forward`.
    """
    if layout is not None:
        return compute_forward_over_channels(rms_norm_forward, locals())
    if not can_compute(**locals()) or x.shape[-1] > _LONGEST:
        return fallback_passes.compute_fallback_forward("rms_norm", **locals())
    h = add_residual(x, residual)
    cols = x.shape[-1]
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    rstd = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / cols).rsqrt_()
    factor = _compute_weight_factor(weight, weight_offset)
    y = (h * rstd).contiguous()
    if factor is not None:
        y.mul_(factor)
    return Forward(
        activate_(_modulate_(y, scale, shift), activation, negative_slope).to(x.dtype),
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    parameter_gradients: bool = True,
) -> Backward:
    """Compute LayerNorm's backward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.layer_norm_backward`.  torch's kernels need the
    saved statistics.
    """
    if layout is not None:
        return compute_backward_over_channels(layer_norm_backward, locals())
    if mean is None or rstd is None or not can_compute(**locals()):
        return fallback_passes.compute_fallback_backward("layer_norm", **locals())
    of_weight, of_bias = (weight, bias) if parameter_gradients else (None, None)
    gradients = _ChunkedRowGradients(x, of_weight, of_bias, residual, dresidual_out)
    factor, addend = _compute_weight_factor(weight, weight_offset), to_float32(bias)
    cols, needed = x.shape[-1:], [True, of_weight is not None, of_bias is not None]
    for piece in gradients.iterate_chunks(dy, mean, rstd):
        h, gradient, centre, inverse = piece
        if activation != "none":
            z = torch.native_layer_norm(h, cols, factor, addend, eps)[0]
            gradient = backpropagate_activation_into_z_(gradient.contiguous(), z, activation, negative_slope)
        gradients.write_chunk(*_backward_of_torch(gradient, h, cols, centre, inverse, factor, addend, needed))
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    parameter_gradients: bool = True,
) -> Backward:
    """Compute RMSNorm's backward pass by torch's kernels, or by `fallback_passes` where these do not suffice.

    Arguments and results are those of `fusednorm.reference.rms_norm_backward`.  torch's kernels need the
    saved statistics.

    dx is LayerNorm's for a mean of zero plus rstd * mean(g), which LayerNorm's formula subtracts.
    """
    if layout is not None:
        return compute_backward_over_channels(rms_norm_backward, locals())
    if rstd is None or not can_compute(**locals()) or x.shape[-1] > _LONGEST:
        return fallback_passes.compute_fallback_backward("rms_norm", **locals())
    of_weight = weight if parameter_gradients else None
    gradients = _ChunkedRowGradients(x, of_weight, None, residual, dresidual_out)
    factor = _compute_weight_factor(weight, weight_offset)
    cols, needed = x.shape[-1:], [True, of_weight is not None, False]
    of_mean = (make_ones(cols[0]) if factor is None else factor) * (1.0 / cols[0])
    for piece in gradients.iterate_chunks(dy, torch.zeros_like(rstd), rstd):
        h, gradient, zero, inverse = piece
        if activation != "none":
            z = (h * inverse).contiguous()
            if factor is not None:
                z.mul_(factor)
            gradient = backpropagate_activation_into_z_(gradient.contiguous(), z, activation, negative_slope)
        dx, dweight, _ = _backward_of_torch(gradient, h, cols, zero, inverse, factor, None, needed)
        dx.add_(torch.mv(gradient, of_mean).unsqueeze_(-1).mul_(inverse))
        gradients.write_chunk(dx, dweight, None)
    return gradients.get_result()


def _compute_weight_factor(weight: Tensor | None, weight_offset: float) -> Tensor | None:
    """Compute the factor of x_hat in float32."""
    factor = to_float32(weight)
    return factor + weight_offset if factor is not None and weight_offset else factor


def _modulate_(z: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Compute z * (1 + scale) + shift in z's memory, contiguous float32 [..., cols], and return z."""
    modulations = select_modulations(scale, shift, None)
    if modulations:
        samples, tokens, cols = compute_sample_shape(z, modulations)
        of_samples = {name: each.reshape(samples, cols) for name, each in modulations.items()}
        modulation = RowModulation(z.view(samples, tokens, cols), **of_samples)
        modulation.apply_(z.view(-1, cols), slice(0, samples * tokens))
    return z


def _cast_sum(h: Tensor, residual: Tensor) -> Tensor:
    """Convert the sum to the form of results: contiguous, in the residual's dtype."""
    return h.to(residual.dtype).contiguous()


class _ChunkedRowGradients:
    """The results of a backward pass over rows, computed in chunks whose float32 copies stay in the cache."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        dresidual_out: Tensor | None,
    ) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        cols = x.shape[-1]
        self._rows = x.reshape(-1, cols)
        self._residual = None if residual is None else residual.reshape(-1, cols)
        self._dresidual_out = None if dresidual_out is None else dresidual_out.reshape(-1, cols)
        self._dx: Tensor | None = None
        self._dresidual: Tensor | None = None
        self._has_own_dresidual = has_own_gradient("layer_norm", NormInputs(x, residual=residual))
        self._dweight: Tensor | None = None
        self._dbias: Tensor | None = None
        self._chunk = slice(0)

    def iterate_chunks(
        self, dy: Tensor, mean: Tensor, rstd: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield each chunk's inputs in float32: x + residual and dy [rows, cols], mean and rstd [rows, 1].

        The caller passes the gradients of each chunk to `write_chunk` before it takes the
        next.
        """
        count, cols = self._rows.shape
        gradient, centre, inverse = dy.reshape(-1, cols), mean.reshape(-1, 1), rstd.reshape(-1, 1)
        is_wide = self._x.dtype == dy.dtype == torch.float32 and self._residual is None
        at_once = count if is_wide else compute_chunk_rows(cols)
        if count <= at_once:
            self._chunk = slice(0, count)
            yield add_residual(self._rows, self._residual), gradient.float(), centre, inverse
            return
        self._dx = torch.empty(self._rows.shape, dtype=self._x.dtype, device="cpu")
        if self._has_own_dresidual and self._residual is not None:
            self._dresidual = torch.empty(self._rows.shape, dtype=self._residual.dtype, device="cpu")
        for piece in split_rows(count, cols):
            self._chunk = piece
            h = add_residual(self._rows[piece], None if self._residual is None else self._residual[piece])
            yield h, gradient[piece].float(), centre[piece], inverse[piece]

    def write_chunk(self, dx: Tensor, dweight: Tensor | None, dbias: Tensor | None) -> None:
        """Store the gradients of the chunk that `iterate_chunks` yielded last; dresidual_out is added to dx.

        The gradients of the parameters are summed over the chunks.
        """
        piece = self._chunk
        if self._dresidual_out is not None:
            dx = dx.add_(self._dresidual_out[piece])
        if self._dx is None:
            self._dx = dx.to(self._x.dtype)
            if self._has_own_dresidual and self._residual is not None:
                self._dresidual = dx.to(self._residual.dtype)
        else:
            self._dx[piece] = dx
            if self._dresidual is not None:
                self._dresidual[piece] = dx
        self._dweight = _add_optional(self._dweight, dweight if self._weight is not None else None)
        self._dbias = _add_optional(self._dbias, dbias if self._bias is not None else None)

    def get_result(self) -> Backward:
        """Return the gradients in the dtypes of their inputs, after all chunks have been written."""
        x, dx, dresidual = self._x, self._dx, self._dresidual
        assert dx is not None
        # Not views, which torch does not change in place if they are results of an autograd function.
        dx.resize_(x.shape)
        if self._residual is not None:
            dresidual = dx if dresidual is None else dresidual.resize_(x.shape)
        return Backward(
            dx, cast_gradient(self._dweight, self._weight), cast_gradient(self._dbias, self._bias), dresidual
        )


def _add_optional(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None or more is None else total.add_(more)
