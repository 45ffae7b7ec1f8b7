"""LayerNorm and RMSNorm of rows by torch's kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusednorm import reference
from fusednorm.cpu.epilogue import activated, through_activation
from fusednorm.cpu.taken import are_floats, are_plain, is_offset, summed, wide
from fusednorm.results import Backward, Forward

_LONGEST = 2**16
"""Columns of an RMSNorm row: torch adds up their squares in a few float32 sums, of ever more terms each."""

_PIECE = 2**16
"""Elements that are widened at a time: they stay in the cache while they are computed with."""

_backward_of_torch: Any = torch.ops.aten.native_layer_norm_backward


def takes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
) -> bool:
    """Whether torch's kernels compute this call: see `fusednorm.cpu`."""
    shape = x.shape
    return (
        are_plain(eps, activation, dropout)
        and are_floats(shape, x, residual)
        and are_floats(shape[-1:], weight, bias)
        and is_offset(weight_offset, weight)
        and bool(shape)
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
    if not takes(x, weight, bias, residual, dropout=dropout, **options):
        more: dict[str, Any] = {"residual": residual, "dropout": dropout, "seed": seed, "stats": stats}
        return reference.layer_norm_forward(x, weight, bias, **options, **more)
    cols, factor, shift = x.shape[-1:], _factor(weight, weight_offset), wide(bias)
    if x.dtype == torch.float32 or activation != "none" or residual is not None:
        h = summed(x, residual)
    else:
        h = x
        # Parameters in float32 make torch give statistics in float32.
        if stats and factor is None and shift is None:
            factor = torch.ones(cols)
    y, mean, rstd = torch.native_layer_norm(h, cols, factor, shift, eps)
    return Forward(
        activated(y, activation).to(x.dtype),
        mean.view(x.shape[:-1]) if stats else None,
        rstd.view(x.shape[:-1]) if stats else None,
        None if residual is None else _returned(h, residual),
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
    if x.ndim == 0 or x.shape[-1] > _LONGEST or not takes(x, weight, None, residual, dropout=dropout, **options):
        more: dict[str, Any] = {"residual": residual, "dropout": dropout, "seed": seed, "stats": stats}
        return reference.rms_norm_forward(x, weight, **options, **more)
    h = summed(x, residual)
    cols = x.shape[-1]
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    rstd = norm.square_().mul_(1.0 / cols).add_(eps).rsqrt_()
    factor = _factor(weight, weight_offset)
    y = torch.mul(h, rstd, out=torch.empty(x.shape))
    if factor is not None:
        y.mul_(factor)
    return Forward(
        activated(y, activation).to(x.dtype),
        None,
        rstd.view(x.shape[:-1]) if stats else None,
        None if residual is None else _returned(h, residual),
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
) -> Backward:
    """See `fusednorm.reference.layer_norm_backward`; statistics must have come, or the reference takes them."""
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    of_x = x.shape[:-1]
    is_taken = (
        takes(x, weight, bias, residual, dropout=dropout, **options)
        and are_floats(x.shape, dy, dresidual_out)
        and _are_statistics(of_x, mean, rstd)
    )
    if not is_taken or mean is None or rstd is None:
        sums: dict[str, Any] = {"residual": residual, "dresidual_out": dresidual_out}
        sums |= {"dropout": dropout, "seed": seed}
        return reference.layer_norm_backward(dy, x, weight, bias, mean=mean, rstd=rstd, **options, **sums)
    gradients = _Gradients(x, weight, bias, residual, dresidual_out)
    factor, shift = _factor(weight, weight_offset), wide(bias)
    cols, needed = x.shape[-1:], [True, weight is not None, bias is not None]
    for piece in gradients.pieces(dy, mean, rstd):
        h, gradient, centre, inverse = piece
        if activation != "none":
            z = torch.native_layer_norm(h, cols, factor, shift, eps)[0]
            gradient = through_activation(gradient, z, activation)
        gradients.write(*_backward_of_torch(gradient, h, cols, centre, inverse, factor, shift, needed))
    return gradients.result()


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
) -> Backward:
    """See `fusednorm.reference.rms_norm_backward`; rstd must have come, or the reference takes it.

    dx is LayerNorm's about a mean of zero, which is less by rstd * mean(g): that is added again.
    """
    options: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "activation": activation}
    is_taken = (
        takes(x, weight, None, residual, dropout=dropout, **options)
        and x.shape[-1] <= _LONGEST
        and are_floats(x.shape, dy, dresidual_out)
        and _are_statistics(x.shape[:-1], rstd)
    )
    if not is_taken or rstd is None:
        sums: dict[str, Any] = {"residual": residual, "dresidual_out": dresidual_out}
        sums |= {"dropout": dropout, "seed": seed}
        return reference.rms_norm_backward(dy, x, weight, rstd=rstd, **options, **sums)
    gradients = _Gradients(x, weight, None, residual, dresidual_out)
    factor = _factor(weight, weight_offset)
    cols, needed = x.shape[-1:], [True, weight is not None, False]
    of_mean = torch.full(cols, 1.0 / cols[0]) if factor is None else factor * (1.0 / cols[0])
    for piece in gradients.pieces(dy, torch.zeros_like(rstd), rstd):
        h, gradient, zero, inverse = piece
        if activation != "none":
            z = h * inverse if factor is None else (h * inverse).mul_(factor)
            gradient = through_activation(gradient, z, activation)
        dx, dweight, _ = _backward_of_torch(gradient, h, cols, zero, inverse, factor, None, needed)
        dx.add_(torch.mv(gradient, of_mean).unsqueeze_(-1).mul_(inverse))
        gradients.write(dx, dweight, None)
    return gradients.result()


class _Gradients:
    """What a backward pass returns; 16-bit tensors and sums are widened, computed with and narrowed by pieces."""

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
        self._outside = None if dresidual_out is None else dresidual_out.reshape(-1, cols)
        self._dx: Tensor | None = None
        self._dresidual: Tensor | None = None
        self._has_own_dresidual = residual is not None and residual.dtype != x.dtype
        self._dweight: Tensor | None = None
        self._dbias: Tensor | None = None
        self._piece = slice(0)

    def pieces(self, dy: Tensor, mean: Tensor, rstd: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """h and dy, [rows, cols], mean and rstd, [rows, 1], all float32, of some rows after others."""
        count, cols = self._rows.shape
        gradient, centre, inverse = dy.reshape(-1, cols), mean.reshape(-1, 1), rstd.reshape(-1, 1)
        is_wide = self._x.dtype == dy.dtype == torch.float32 and self._residual is None
        at_once = count if is_wide else max(1, _PIECE // cols)
        if at_once >= count:
            self._piece = slice(0, count)
            yield summed(self._rows, self._residual), gradient.float(), centre, inverse
            return
        self._dx = torch.empty(self._rows.shape, dtype=self._x.dtype)
        if self._has_own_dresidual and self._residual is not None:
            self._dresidual = torch.empty(self._rows.shape, dtype=self._residual.dtype)
        for start in range(0, count, at_once):
            self._piece = piece = slice(start, start + at_once)
            h = summed(self._rows[piece], None if self._residual is None else self._residual[piece])
            yield h, gradient[piece].float(), centre[piece], inverse[piece]

    def write(self, dx: Tensor, dweight: Tensor | None, dbias: Tensor | None) -> None:
        """Take the gradients of the piece that came last."""
        piece = self._piece
        if self._outside is not None:
            dx = dx.add_(self._outside[piece])
        if self._dx is None:
            self._dx = dx.to(self._x.dtype)
            if self._has_own_dresidual and self._residual is not None:
                self._dresidual = dx.to(self._residual.dtype)
        else:
            self._dx[piece] = dx
            if self._dresidual is not None:
                self._dresidual[piece] = dx
        self._dweight = _added(self._dweight, dweight if self._weight is not None else None)
        self._dbias = _added(self._dbias, dbias if self._bias is not None else None)

    def result(self) -> Backward:
        x, dx, dresidual = self._x, self._dx, self._dresidual
        assert dx is not None
        dx = dx.view(x.shape)
        if self._residual is not None:
            dresidual = dx if dresidual is None else dresidual.view(x.shape)
        return Backward(dx, _narrow(self._dweight, self._weight), _narrow(self._dbias, self._bias), dresidual)


def _are_statistics(shape: torch.Size, *statistics: Tensor | None) -> bool:
    return all(s is not None and s.dtype == torch.float32 and s.is_cpu and s.shape == shape for s in statistics)


def _factor(weight: Tensor | None, weight_offset: float) -> Tensor | None:
    """What x_hat is multiplied by, float32."""
    factor = wide(weight)
    return factor + weight_offset if factor is not None and weight_offset else factor


def _returned(h: Tensor, residual: Tensor) -> Tensor:
    """The sum as the functions return it: in the residual's dtype, contiguous."""
    return h.to(residual.dtype).contiguous()


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None or more is None else total.add_(more)


def _narrow(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
