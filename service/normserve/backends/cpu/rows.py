"""LayerNorm and RMSNorm of [rows, N] on the CPU."""

from collections.abc import Callable, Iterator

import torch
from fusednorm import reference
from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.cpu.epilogue import activate_, summed, through_activation, widened

# Of one piece, so that its float32 intermediates stay in a core's cache.
_PIECE_ELEMENTS = 128 * 1024

# Of a result that torch may write into memory of its own: malloc has as much at hand, and nothing is copied.  More
# would come and go, and the process's size with it.
_WHOLE_ELEMENTS = 256 * 1024


def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """See `fusednorm.reference.layer_norm_forward`.

    Args: memory_like: gives a large y its memory where that is as large as x; it may be x's own.
    """
    if dropout:
        return reference.layer_norm_forward(
            x,
            weight,
            bias,
            eps=eps,
            residual=residual,
            activation=activation,
            dropout=dropout,
            seed=seed,
            out_dtype=out_dtype,
            stats=stats,
        )
    weight, bias = widened(weight), widened(bias)
    if x.dtype == torch.float32 and residual is None and out_dtype in (None, torch.float32):
        if x.numel() > _WHOLE_ELEMENTS:
            return _layer_norm_by_pieces(x, weight, bias, eps, activation, stats, memory_like(x))
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = activate_(y, activation)
        return Forward(y, *_flat(mean, rstd)) if stats else Forward(y)
    out = _Outputs(x, residual, out_dtype, memory_like)
    for piece in _pieces(x):
        h = out.sum(piece)
        y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], weight, bias, eps)
        out.write(piece, activate_(y, activation), mean, rstd)
    return out.result(stats, centred=True)


def _layer_norm_by_pieces(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    stats: bool,
    y: Tensor,
) -> Forward:
    """Write y, whose memory has been used before: of 16 ms for 64 MiB, new pages took 3 to 7.

    In x's own it takes a quarter less still, and leaves more of the cache to what comes next.
    """
    mean = x.new_empty(x.shape[0] if stats else 0)
    rstd = torch.empty_like(mean)
    for piece in _pieces(x):
        part, centre, scale = torch.native_layer_norm(x[piece], x.shape[-1:], weight, bias, eps)
        y[piece] = activate_(part, activation)
        if stats:
            mean[piece], rstd[piece] = centre[:, 0], scale[:, 0]
    return Forward(y, mean, rstd) if stats else Forward(y)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """See `fusednorm.reference.rms_norm_forward`, and `layer_norm_forward` for `memory_like`."""
    if dropout:
        return reference.rms_norm_forward(
            x,
            weight,
            eps=eps,
            residual=residual,
            activation=activation,
            dropout=dropout,
            seed=seed,
            out_dtype=out_dtype,
            stats=stats,
        )
    weight = widened(weight)
    out = _Outputs(x, residual, out_dtype, memory_like)
    for piece in _pieces(x):
        h = out.sum(piece)
        rstd = _rms_rstd(h, eps)
        y = h * rstd
        if weight is not None:
            y *= weight
        out.write(piece, activate_(y, activation), None, rstd)
    return out.result(stats, centred=False)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """See `fusednorm.reference.layer_norm_backward`."""
    if dropout:
        return reference.layer_norm_backward(
            dy,
            x,
            weight,
            bias,
            eps=eps,
            mean=mean,
            rstd=rstd,
            residual=residual,
            dresidual_out=dresidual_out,
            activation=activation,
            dropout=dropout,
            seed=seed,
        )
    w, b = widened(weight), widened(bias)
    gradients = _Gradients(x, weight, bias, residual)
    for piece in _pieces(x):
        h = summed(x[piece], None if residual is None else residual[piece])
        z, centre, scale = torch.native_layer_norm(h, h.shape[-1:], w, b, eps)
        if mean is not None and rstd is not None:
            centre, scale = mean[piece].reshape(-1, 1), rstd[piece].reshape(-1, 1)
        dz = through_activation(dy[piece].float(), z, activation)
        needed = [True, weight is not None, bias is not None]
        # torch's kernel forms x_hat as h·rstd - mean·rstd, which cancels when the mean is large; h without its mean
        # has the same gradient.
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dz, h - centre, h.shape[-1:], torch.zeros_like(centre), scale, w, b, needed
        )
        gradients.write(piece, dx, dresidual_out, dw, db)
    return gradients.result()


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    rstd: Tensor | None = None,
    residual: Tensor | None = None,
    dresidual_out: Tensor | None = None,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Backward:
    """See `fusednorm.reference.rms_norm_backward`."""
    if dropout:
        return reference.rms_norm_backward(
            dy,
            x,
            weight,
            eps=eps,
            rstd=rstd,
            residual=residual,
            dresidual_out=dresidual_out,
            activation=activation,
            dropout=dropout,
            seed=seed,
        )
    w = widened(weight)
    gradients = _Gradients(x, weight, None, residual)
    for piece in _pieces(x):
        h = summed(x[piece], None if residual is None else residual[piece])
        scale = _rms_rstd(h, eps) if rstd is None else rstd[piece].reshape(-1, 1)
        xhat = h * scale
        z = xhat if w is None else xhat * w
        dz = through_activation(dy[piece].float(), z, activation)
        g = dz if w is None else dz * w
        dx = (g - xhat * _row_mean(g * xhat)) * scale
        dw = None if w is None else (dz * xhat).sum(0)
        gradients.write(piece, dx, dresidual_out, dw, None)
    return gradients.result()


class _Outputs:
    """What forward gives back, filled piece by piece."""

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
        memory_like: Callable[[Tensor], Tensor],
    ) -> None:
        self._x = x
        self._residual = residual
        is_given = out_dtype in (None, x.dtype) and x.numel() > _WHOLE_ELEMENTS
        self._y = memory_like(x) if is_given else torch.empty_like(x, dtype=out_dtype)
        self._residual_out = None if residual is None else torch.empty_like(x, dtype=residual.dtype)
        self._mean = x.new_empty(x.shape[0], dtype=torch.float32)
        self._rstd = torch.empty_like(self._mean)

    def sum(self, piece: slice) -> Tensor:
        h = summed(self._x[piece], None if self._residual is None else self._residual[piece])
        if self._residual_out is not None:
            self._residual_out[piece] = h
        return h

    def write(self, piece: slice, y: Tensor, mean: Tensor | None, rstd: Tensor) -> None:
        self._y[piece] = y
        self._rstd[piece] = rstd[:, 0]
        if mean is not None:
            self._mean[piece] = mean[:, 0]

    def result(self, stats: bool, *, centred: bool) -> Forward:
        mean = self._mean if stats and centred else None
        return Forward(self._y, mean, self._rstd if stats else None, self._residual_out)


class _Gradients:
    """What backward gives back; parameter gradients are summed piece by piece, in order."""

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
        self._dx = torch.empty_like(x)
        self._dresidual = None if residual is None else self._dx
        if residual is not None and residual.dtype != x.dtype:
            self._dresidual = torch.empty_like(x, dtype=residual.dtype)
        self._weight, self._bias = weight, bias
        self._dweight = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
        self._dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def write(
        self,
        piece: slice,
        dx: Tensor,
        dresidual_out: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        dh = dx if dresidual_out is None else dx + dresidual_out[piece]
        self._dx[piece] = dh
        if self._dresidual is not None and self._dresidual is not self._dx:
            self._dresidual[piece] = dh
        if self._dweight is not None and dweight is not None:
            self._dweight += dweight
        if self._dbias is not None and dbias is not None:
            self._dbias += dbias

    def result(self) -> Backward:
        dweight, dbias = _as(self._dweight, self._weight), _as(self._dbias, self._bias)
        return Backward(self._dx, dweight, dbias, self._dresidual)


def _pieces(x: Tensor) -> Iterator[slice]:
    rows, cols = x.shape
    step = max(1, _PIECE_ELEMENTS // cols)
    return (slice(start, start + step) for start in range(0, rows, step))


def _row_mean(t: Tensor) -> Tensor:
    """Mean of each row as [rows, 1]: LayerNorm's, because `Tensor.mean` sums a lone row in another order."""
    return torch.native_layer_norm(t, t.shape[-1:], None, None, 0.0)[1]


def _rms_rstd(h: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(h²) + eps) as [rows, 1], from LayerNorm's moments: mean(h²) = variance + mean²."""
    _, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], None, None, 0.0)
    return torch.rsqrt(rstd.square().reciprocal() + mean.square() + eps)


def _flat(*statistics: Tensor) -> list[Tensor]:
    return [statistic.reshape(-1) for statistic in statistics]


def _as(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
