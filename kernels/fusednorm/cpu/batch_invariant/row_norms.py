"""LayerNorm and RMSNorm on the CPU over [rows, N], or over [tokens, heads, N] with separate parameters per head.

Rows are computed one after another; with parameters [heads, N] row r has those of head r modulo heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.cpu.batch_invariant.outputs import RowResults, flatten_rows, is_small_result
from fusednorm.cpu.batch_invariant.parameters import (
    RowParameter,
    accumulate_parameter_gradient,
    apply_affine_,
    multiply_by_weight,
)
from fusednorm.cpu.chunks import split_rows
from fusednorm.cpu.dropout_mask import DropoutMask, make_dropout_mask
from fusednorm.cpu.epilogue import apply_epilogue_, backpropagate_epilogue
from fusednorm.cpu.supported_arguments import add_residual, cast_gradient, to_float32
from fusednorm.results import Backward, Forward


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
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """See `fusednorm.reference.layer_norm_forward`.

    Args:
        memory_like: returns the memory of a large y if that has the size of x; it may be x's memory.  Memory that
            has been used before takes less time than new pages, and x's memory leaves more of the cache to later
            calls.
    """
    drop = make_dropout_mask(dropout, seed)
    is_float32 = x.dtype == torch.float32 and residual is None and out_dtype in (None, torch.float32)
    if is_float32 and x.ndim == 2 and not weight_offset and is_small_result(x):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], to_float32(weight), to_float32(bias), eps)
        if drop is not None or activation != "none":
            y = apply_epilogue_(y, activation, drop, _compute_dropout_mask(drop, x, slice(0, len(x))))
        return Forward(y, *_flatten_statistics(mean, rstd)) if stats else Forward(y)
    w, b = RowParameter(weight, weight_offset), RowParameter(bias)
    heads = _count_own_heads(x)
    out = RowResults(x, residual, out_dtype, stats=stats, centred=True, memory_like=memory_like)
    for piece in split_rows(out.rows, out.cols, heads):
        h = out.add_residual(piece)
        y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], w.common, b.common, eps)
        del h
        if heads:
            apply_affine_(y, w.slice_heads(piece), b.slice_heads(piece))
        out.write_chunk(
            piece, apply_epilogue_(y, activation, drop, _compute_dropout_mask(drop, x, piece)), mean, rstd
        )
        del y
    return out.get_result()


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
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """See `fusednorm.reference.rms_norm_forward`, and `layer_norm_forward` for `memory_like`."""
    w = RowParameter(weight, weight_offset)
    drop = make_dropout_mask(dropout, seed)
    heads = _count_own_heads(x)
    out = RowResults(x, residual, out_dtype, stats=stats, centred=False, memory_like=memory_like)
    for piece in split_rows(out.rows, out.cols, heads):
        h = out.add_residual(piece)
        rstd = _compute_rms_rstd(h, eps)
        y = h * rstd
        del h
        apply_affine_(y, w.get_for_rows(piece), None)
        out.write_chunk(
            piece, apply_epilogue_(y, activation, drop, _compute_dropout_mask(drop, x, piece)), None, rstd
        )
        del y
    return out.get_result()


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
    """See `fusednorm.reference.layer_norm_backward`."""
    w, b = RowParameter(weight, weight_offset), RowParameter(bias)
    drop = make_dropout_mask(dropout, seed)
    is_own = residual is not None or x.dtype != torch.float32
    gradients, heads = _RowGradients(x, weight, bias, residual), _count_own_heads(x)
    x, dy, residual, dresidual_out, mean, rstd = _flatten_tensors(x, dy, residual, dresidual_out, mean, rstd)
    for piece in split_rows(len(x), x.shape[-1], heads):
        h = add_residual(x[piece], None if residual is None else residual[piece])
        z, centre, scale = torch.native_layer_norm(h, h.shape[-1:], w.common, b.common, eps)
        weight_of_heads = w.slice_heads(piece)
        if heads:
            apply_affine_(z, weight_of_heads, b.slice_heads(piece))
        if mean is not None and rstd is not None:
            centre, scale = mean[piece].reshape(-1, 1), rstd[piece].reshape(-1, 1)
        dropout_mask = _compute_dropout_mask(drop, x, piece)
        dz = backpropagate_epilogue(dy[piece], z, activation, drop, dropout_mask, overwrites_z=True)
        del z, dropout_mask
        # torch's kernel forms x_hat as h·rstd - mean·rstd, which cancels when the mean is large; h without its mean
        # has the same gradient.
        h = h.sub_(centre) if is_own else h - centre
        # Of a lone row, which may be long, torch's sums over the rows would take memory for each thread.
        is_lone = len(h) == 1
        of_all = not (is_lone or heads)
        needed = [True, weight is not None and of_all, bias is not None and of_all]
        g = dz if weight_of_heads is None else multiply_by_weight(dz, weight_of_heads)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            g, h, h.shape[-1:], torch.zeros_like(centre), scale, w.common, b.common, needed
        )
        del g, weight_of_heads
        if heads:
            dw = None if weight is None else h.mul_(scale).mul_(dz)
            db = None if bias is None else dz
        elif is_lone:
            dw = None if weight is None else h.mul_(scale).mul_(dz)[0]
            db = None if bias is None else dz[0]
        gradients.add_chunk(piece, dx, dresidual_out, dw, db)
        del h, dz, dx, dw, db
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
) -> Backward:
    """See `fusednorm.reference.rms_norm_backward`."""
    parameter = RowParameter(weight, weight_offset)
    drop = make_dropout_mask(dropout, seed)
    is_own = residual is not None or x.dtype != torch.float32
    gradients, heads = _RowGradients(x, weight, None, residual), _count_own_heads(x)
    x, dy, residual, dresidual_out, rstd = _flatten_tensors(x, dy, residual, dresidual_out, rstd)
    for piece in split_rows(len(x), x.shape[-1], heads):
        h = add_residual(x[piece], None if residual is None else residual[piece])
        scale = _compute_rms_rstd(h, eps) if rstd is None else rstd[piece].reshape(-1, 1)
        xhat = h.mul_(scale) if is_own else h * scale
        del h
        w = parameter.get_for_rows(piece)
        z = xhat if w is None else multiply_by_weight(xhat, w)
        dropout_mask = _compute_dropout_mask(drop, x, piece)
        dz = backpropagate_epilogue(dy[piece], z, activation, drop, dropout_mask, overwrites_z=w is not None)
        del z, dropout_mask
        g = dz if w is None else multiply_by_weight(dz, w)
        dx = g * xhat
        torch.mul(xhat, _compute_row_mean(dx), out=dx)
        torch.sub(g, dx, out=dx).mul_(scale)
        del g
        dw = None if w is None else xhat.mul_(dz) if heads else xhat.mul_(dz).sum(0)
        gradients.add_chunk(piece, dx, dresidual_out, dw, None)
        del xhat, dz, dx, dw
    return gradients.get_result()


class _RowGradients:
    """The results of a backward pass; parameter gradients are summed piece by piece, in order."""

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
        self._dx = torch.empty_like(x)
        self._dresidual = None if residual is None else self._dx
        self._rows = [flatten_rows(self._dx)]
        if residual is not None and residual.dtype != x.dtype:
            self._dresidual = torch.empty_like(residual)
            self._rows.append(flatten_rows(self._dresidual))
        self._weight, self._bias = weight, bias
        self._dweight = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
        self._dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add_chunk(
        self,
        piece: slice,
        dx: Tensor,
        dresidual_out: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        if dresidual_out is not None:
            dx.add_(dresidual_out[piece])
        for rows in self._rows:
            rows[piece] = dx
        if self._dweight is not None and dweight is not None:
            accumulate_parameter_gradient(self._dweight, dweight, piece)
        if self._dbias is not None and dbias is not None:
            accumulate_parameter_gradient(self._dbias, dbias, piece)

    def get_result(self) -> Backward:
        dweight, dbias = cast_gradient(self._dweight, self._weight), cast_gradient(self._dbias, self._bias)
        return Backward(self._dx, dweight, dbias, self._dresidual)


def _count_own_heads(x: Tensor) -> int:
    """Return the number of heads that have separate parameters, or 0 if all rows share them."""
    return x.shape[1] if x.ndim == 3 else 0


def _flatten_tensors(x: Tensor, *others: Tensor | None) -> Any:
    """Reshape x and tensors of x's shape to [rows, cols], and statistics to [rows]."""
    if x.ndim == 2:
        return (x, *others)
    return tuple([None if each is None else each.flatten(0, 1) for each in (x, *others)])


def _compute_dropout_mask(dropout: DropoutMask | None, x: Tensor, piece: slice) -> Tensor | None:
    """Compute the dropout mask of some rows, or None without dropout."""
    return None if dropout is None else dropout.compute(range(piece.start, piece.stop), range(x.shape[-1]))


def _compute_row_mean(t: Tensor) -> Tensor:
    """Compute the mean of each row, [rows, 1], by LayerNorm.

    `Tensor.mean` sums a single row in another order.
    """
    return torch.native_layer_norm(t, t.shape[-1:], None, None, 0.0)[1]


def _compute_rms_rstd(h: Tensor, eps: float) -> Tensor:
    """Compute 1 / sqrt(mean(h²) + eps) as [rows, 1], from LayerNorm's moments: mean(h²) = variance + mean²."""
    _, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], None, None, 0.0)
    return torch.rsqrt(rstd.square().reciprocal() + mean.square() + eps)


def _flatten_statistics(*statistics: Tensor) -> list[Tensor]:
    return [statistic.reshape(-1) for statistic in statistics]
