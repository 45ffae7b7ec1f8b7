"""LayerNorm and RMSNorm on the CPU over [rows, N], or over [tokens, heads, N] with parameters for each head.

Rows are computed one after another; with parameters [heads, N], row r has those of head r modulo heads.  With
scale, shift or gate [samples, N] for each sample, rows are [samples, tokens, N].  Rows of a result in float8_e4m3fn
each have a scale.

With the layout "nchw", x is [B, C, *spatial] and a row is the channels of a position: chunks of rows are copied.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.inputs import NormInputs, has_own_gradient
from fusednorm.cpu.batch_invariant.channel_rows import ChannelRows
from fusednorm.cpu.batch_invariant.row_modulation import ModulationGradients, RowModulation
from fusednorm.cpu.chunks import split_rows
from fusednorm.cpu.dropout_mask import DropoutMask, make_dropout_mask
from fusednorm.cpu.epilogue import apply_epilogue_, backpropagate_epilogue
from fusednorm.cpu.supported_arguments import cast_gradient, to_float32
from fusednorm.results import Backward, Forward

WHOLE_ELEMENTS = 256 * 1024
"""The number of elements above which y is written to memory that the caller provides.

Smaller memory is retained by malloc, and nothing is copied; larger memory would be returned to the system after
each call.
"""

_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
# The smallest normal float32: it keeps a row of zeros zero.
_SMALLEST_SCALE = 2.0**-126


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
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """Compute LayerNorm's forward pass with the arguments and results of `fusednorm.reference`.

    Args:
        memory_like: returns the memory of a large y if that has the size of x; it may be x's memory.  Memory that
            has been used before takes less time than new pages, and x's memory leaves more of the cache to later
            calls.
    """
    drop = make_dropout_mask(dropout, seed)
    is_float32 = x.dtype == torch.float32 and residual is None and out_dtype in (None, torch.float32)
    if is_float32 and x.ndim == 2 and layout is None and not weight_offset and _is_small_result(x):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], to_float32(weight), to_float32(bias), eps)
        if drop is not None or activation != "none":
            y = apply_epilogue_(
                y, activation, negative_slope, drop, _compute_dropout_mask(drop, x.shape[1], slice(0, len(x)))
            )
        return Forward(y, *_flatten_statistics(mean, rstd)) if stats else Forward(y)
    w, b = _RowParameter(weight, weight_offset), _RowParameter(bias)
    modulation, heads = RowModulation(x, scale, shift, gate, layout), _count_own_heads(x, weight, bias)
    out = RowResults(
        x, residual, modulation, out_dtype, layout=layout, stats=stats, centred=True, memory_like=memory_like
    )
    for piece in split_rows(out.rows, out.cols, heads or modulation.tokens):
        h = out.add_residual(piece)
        y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], w.common, b.common, eps)
        del h
        if heads:
            _apply_affine_(y, w.slice_heads(piece), b.slice_heads(piece))
        modulation.apply_(y, piece)
        out.write_chunk(
            piece,
            apply_epilogue_(y, activation, negative_slope, drop, _compute_dropout_mask(drop, out.cols, piece)),
            mean,
            rstd,
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    out_dtype: torch.dtype | None = None,
    stats: bool = False,
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Forward:
    """Compute RMSNorm's forward pass with the arguments and results of `fusednorm.reference`.

    `memory_like` is as in `layer_norm_forward`.
    """
    w = _RowParameter(weight, weight_offset)
    drop = make_dropout_mask(dropout, seed)
    modulation, heads = RowModulation(x, scale, shift, gate, layout), _count_own_heads(x, weight)
    out = RowResults(
        x, residual, modulation, out_dtype, layout=layout, stats=stats, centred=False, memory_like=memory_like
    )
    for piece in split_rows(out.rows, out.cols, heads or modulation.tokens):
        h = out.add_residual(piece)
        rstd = _compute_rms_rstd(h, eps)
        y = h * rstd
        del h
        _apply_affine_(y, w.get_for_rows(piece), None)
        modulation.apply_(y, piece)
        out.write_chunk(
            piece,
            apply_epilogue_(y, activation, negative_slope, drop, _compute_dropout_mask(drop, out.cols, piece)),
            None,
            rstd,
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
) -> Backward:
    """Compute LayerNorm's backward pass with the arguments and results of `fusednorm.reference`."""
    w, b = _RowParameter(weight, weight_offset), _RowParameter(bias)
    drop = make_dropout_mask(dropout, seed)
    is_own = residual is not None or x.dtype != torch.float32
    heads = _count_own_heads(x, weight, bias)
    modulation = RowModulation(x, scale, shift, gate, layout)
    of_samples = ModulationGradients(modulation)
    gradients = _RowGradients(x, weight, bias, residual, of_samples, layout)
    x, dy, residual, dresidual_out = _flatten_tensors(layout, x, dy, residual, dresidual_out)
    rows, cols = x.shape
    for piece in split_rows(rows, cols, heads or modulation.tokens):
        h = modulation.add_residual(piece, x[piece], None if residual is None else residual[piece])
        z, centre, inverse = torch.native_layer_norm(h, h.shape[-1:], w.common, b.common, eps)
        weight_of_heads = w.slice_heads(piece)
        if heads:
            _apply_affine_(z, weight_of_heads, b.slice_heads(piece))
        if mean is not None and rstd is not None:
            centre, inverse = mean.reshape(-1, 1)[piece], rstd.reshape(-1, 1)[piece]
        dropout_mask = _compute_dropout_mask(drop, cols, piece)
        # The norm itself is needed again only if it is modulated.
        modulated = modulation.apply_(z.clone(), piece) if modulation.is_affine else z
        dz = backpropagate_epilogue(
            dy[piece], modulated, activation, negative_slope, drop, dropout_mask, overwrites_z=True
        )
        del modulated, dropout_mask
        dz = of_samples.add_affine_chunk(piece, dz, z)
        del z
        # torch's kernel forms x_hat as h·rstd - mean·rstd, which cancels when the mean is large; h without its mean
        # has the same gradient.
        h = h.sub_(centre) if is_own else h - centre
        # Of a lone row, which may be long, torch's sums over the rows would take memory for each thread.
        is_lone = len(h) == 1
        of_all = not (is_lone or heads)
        needed = [True, weight is not None and of_all, bias is not None and of_all]
        g = dz if weight_of_heads is None else _multiply_by_weight(dz, weight_of_heads)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            g, h, h.shape[-1:], torch.zeros_like(centre), inverse, w.common, b.common, needed
        )
        del g, weight_of_heads
        if heads:
            dw = None if weight is None else h.mul_(inverse).mul_(dz)
            db = None if bias is None else dz
        elif is_lone:
            dw = None if weight is None else h.mul_(inverse).mul_(dz)[0]
            db = None if bias is None else dz[0]
        gradients.add_chunk(piece, dx, x, dresidual_out, dw, db)
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
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
) -> Backward:
    """Compute RMSNorm's backward pass with the arguments and results of `fusednorm.reference`."""
    parameter = _RowParameter(weight, weight_offset)
    drop = make_dropout_mask(dropout, seed)
    is_own = residual is not None or x.dtype != torch.float32
    heads = _count_own_heads(x, weight)
    modulation = RowModulation(x, scale, shift, gate, layout)
    of_samples = ModulationGradients(modulation)
    gradients = _RowGradients(x, weight, None, residual, of_samples, layout)
    x, dy, residual, dresidual_out = _flatten_tensors(layout, x, dy, residual, dresidual_out)
    rows, cols = x.shape
    for piece in split_rows(rows, cols, heads or modulation.tokens):
        h = modulation.add_residual(piece, x[piece], None if residual is None else residual[piece])
        inverse = _compute_rms_rstd(h, eps) if rstd is None else rstd.reshape(-1, 1)[piece]
        xhat = h.mul_(inverse) if is_own else h * inverse
        del h
        w = parameter.get_for_rows(piece)
        z = xhat if w is None else _multiply_by_weight(xhat, w)
        dropout_mask = _compute_dropout_mask(drop, cols, piece)
        modulated = modulation.apply_(z.clone(), piece) if modulation.is_affine else z
        is_new = modulated is not xhat
        dz = backpropagate_epilogue(
            dy[piece], modulated, activation, negative_slope, drop, dropout_mask, overwrites_z=is_new
        )
        del modulated, dropout_mask
        dz = of_samples.add_affine_chunk(piece, dz, z)
        del z
        g = dz if w is None else _multiply_by_weight(dz, w)
        dx = g * xhat
        torch.mul(xhat, _compute_row_mean(dx), out=dx)
        torch.sub(g, dx, out=dx).mul_(inverse)
        del g
        dw = None if w is None else xhat.mul_(dz) if heads else xhat.mul_(dz).sum(0)
        gradients.add_chunk(piece, dx, x, dresidual_out, dw, None)
        del xhat, dz, dx, dw
    return gradients.get_result()


def _count_own_heads(x: Tensor, *parameters: Tensor | None) -> int:
    """Return the number of heads that have separate parameters, or 0 if all rows share them."""
    return x.shape[1] if any(each is not None and each.ndim == 2 for each in parameters) else 0


def _compute_dropout_mask(dropout: DropoutMask | None, cols: int, piece: slice) -> Tensor | None:
    """Compute the dropout mask of some rows, or None without dropout."""
    return None if dropout is None else dropout.compute(range(piece.start, piece.stop), range(cols))


def _compute_row_mean(t: Tensor) -> Tensor:
    """Compute the mean of each row as [rows, 1], with bits that do not depend on the number of rows.

    The mean is LayerNorm's, since `Tensor.mean` sums a single row in another order.
    """
    return torch.native_layer_norm(t, t.shape[-1:], None, None, 0.0)[1]


def _compute_rms_rstd(h: Tensor, eps: float) -> Tensor:
    """Compute 1 / sqrt(mean(h²) + eps) as [rows, 1], from LayerNorm's moments: mean(h²) = variance + mean²."""
    _, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], None, None, 0.0)
    squares = rstd.square().reciprocal() + mean.square()
    # The moments of a row whose squares overflow, or which has an infinity, are NaN; its squares are infinite.
    unknown = squares.isnan().squeeze(-1)
    if unknown.any():
        rows = h if unknown.all() else h[unknown]
        squares[unknown] = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square() / h.shape[-1]
    return torch.rsqrt(squares + eps)


def _flatten_statistics(*statistics: Tensor) -> list[Tensor]:
    return [statistic.reshape(-1) for statistic in statistics]


def _is_small_result(x: Tensor) -> bool:
    """Return whether torch may allocate the memory for a result of this size."""
    return x.numel() <= WHOLE_ELEMENTS


class RowResults:
    """The results of a forward pass over rows: y, and others if wanted.  They are written chunk by chunk."""

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        modulation: RowModulation,
        out_dtype: torch.dtype | None,
        *,
        layout: str | None = None,
        stats: bool,
        centred: bool,
        memory_like: Callable[[Tensor], Tensor],
    ) -> None:
        """Args:
        layout: "nchw" if x and residual are [B, C, *spatial].
        stats: whether to store mean and rstd; the mean only with `centred`.
        memory_like: see `layer_norm_forward`.
        """
        self._x, self._residual = _flatten_tensors(layout, x, residual)
        self._modulation = modulation
        self.rows, self.cols = self._x.shape
        is_given = out_dtype in (None, x.dtype) and not _is_small_result(x)
        self._y = memory_like(x) if is_given else torch.empty_like(x, dtype=out_dtype)
        self._residual_out = None if residual is None else torch.empty_like(residual)
        self._y_rows, self._sum_rows = _flatten_tensors(layout, self._y, self._residual_out)
        is_float8 = out_dtype == torch.float8_e4m3fn
        of_rows = x.shape[:-1] if layout is None else (x.shape[0], *x.shape[2:])
        self._scale = x.new_empty(of_rows, dtype=torch.float32) if is_float8 else None
        self._rstd = x.new_empty(of_rows, dtype=torch.float32) if stats else None
        self._mean = x.new_empty(of_rows, dtype=torch.float32) if stats and centred else None

    def add_residual(self, piece: slice) -> Tensor:
        """Compute residual + gate * x of a range of rows in float32, and store it as residual_out.

        Without a residual, return x in float32.
        """
        residual = None if self._residual is None else self._residual[piece]
        h = self._modulation.add_residual(piece, self._x[piece], residual)
        if self._sum_rows is not None:
            self._sum_rows[piece] = h
        return h

    def write_chunk(self, piece: slice, y: Tensor, mean: Tensor | None, rstd: Tensor | None) -> None:
        """Store y [rows, cols] in its dtype, and mean and rstd [rows, 1] if they are wanted.

        For a y in float8, y is divided by the scale of each row first, in its memory.
        """
        if self._scale is not None:
            self._scale.view(-1)[piece] = scale_rows_for_float8_(y)
        self._y_rows[piece] = y
        if self._rstd is not None and rstd is not None:
            self._rstd.view(-1)[piece] = rstd[:, 0]
        if self._mean is not None and mean is not None:
            self._mean.view(-1)[piece] = mean[:, 0]

    def get_result(self) -> Forward:
        """Return the written results."""
        return Forward(self._y, self._mean, self._rstd, self._residual_out, self._scale)


def scale_rows_for_float8_(y: Tensor) -> Tensor:
    """Divide each row of y, in place, by the scale that fits it to float8_e4m3fn; return the scales [rows].

    Later, a copy of y in float8_e4m3fn rounds the values.  The bits are those of
    `fusednorm.reference.float8.quantise_rows`, without copies of y.
    """
    least, most = torch.aminmax(y, dim=-1)
    scale = torch.maximum(least.neg_(), most).div_(_LARGEST_FLOAT8).clamp_min_(_SMALLEST_SCALE)
    y.div_(scale.unsqueeze(-1)).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
    return scale


class _RowGradients:
    """The results of a backward pass over rows, written chunk by chunk.

    The gradients of the parameters are summed over the chunks, in order.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        of_samples: ModulationGradients,
        layout: str | None,
    ) -> None:
        self._dx = torch.empty_like(x)
        self._dresidual = None if residual is None else self._dx
        inputs = NormInputs(x, residual=residual, gate=of_samples.modulation.gate)
        if residual is not None and has_own_gradient("layer_norm", inputs):
            self._dresidual = torch.empty_like(residual)
        self._dx_rows, self._dresidual_rows = _flatten_tensors(layout, self._dx, self._dresidual)
        self._of_samples = of_samples
        self._weight, self._bias = weight, bias
        self._dweight = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
        self._dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add_chunk(
        self,
        piece: slice,
        dh: Tensor,
        x: Tensor | ChannelRows,
        dresidual_out: Tensor | ChannelRows | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        """Store the gradients of a range of rows, and add its contributions to the parameter gradients.

        Args:
            dh: the gradient of residual + gate * x, without dresidual_out; overwritten.
            x, dresidual_out: all rows.
        """
        if dresidual_out is not None:
            dh.add_(dresidual_out[piece])
        if self._dresidual is not None and self._dresidual is not self._dx:
            self._dresidual_rows[piece] = dh
        self._dx_rows[piece] = self._of_samples.add_gate_chunk_(piece, dh, x)
        if self._dweight is not None and dweight is not None:
            _accumulate_parameter_gradient(self._dweight, dweight, piece)
        if self._dbias is not None and dbias is not None:
            _accumulate_parameter_gradient(self._dbias, dbias, piece)

    def get_result(self) -> Backward:
        dweight, dbias = cast_gradient(self._dweight, self._weight), cast_gradient(self._dbias, self._bias)
        return self._of_samples.add_to(Backward(self._dx, dweight, dbias, self._dresidual))


def _accumulate_parameter_gradient(total: Tensor, gradient: Tensor, piece: slice) -> None:
    """Add the contribution of a range of rows to a parameter's gradient.

    Args:
        total: [cols], or [heads, cols].
        gradient: of all these rows [cols], or of each where heads have their own, [rows, cols].
    """
    if gradient.ndim == 1:
        total += gradient
        return
    heads, cols = total.shape
    first = piece.start % heads
    of_token = min(len(gradient), heads)
    total[first : first + of_token] += gradient.view(-1, of_token, cols).sum(0)


def _flatten_tensors(layout: str | None, x: Tensor, *others: Tensor | None) -> Any:
    """View tensors of x's shape as rows [rows, cols]: a `Tensor` of each, with a layout `ChannelRows`."""
    if layout is not None:
        return tuple([None if each is None else ChannelRows(each) for each in (x, *others)])
    if x.ndim == 2:
        return (x, *others)
    return tuple([None if each is None else each.flatten(0, 1) for each in (x, *others)])


class _RowParameter:
    """A weight or a bias of rows, in float32: shared by all rows, separate for each head, or absent.

    Attributes:
        common: [cols] in float32 if all rows share it, else None.
    """

    common: Tensor | None
    _of_heads: Tensor | None
    __slots__ = ("_of_heads", "_offset", "common")

    def __init__(self, tensor: Tensor | None, offset: float = 0.0) -> None:
        """Args:
        tensor: [cols] or [heads, cols], of any type.
        offset: a number that is added to `tensor` in float32.
        """
        self.common = self._of_heads = None
        self._offset = offset
        if tensor is None:
            return
        if tensor.ndim == 2:
            self._of_heads = tensor
        else:
            self.common = _cast_with_offset(tensor, offset) if offset else tensor.float()

    def slice_heads(self, piece: slice) -> Tensor | None:
        """Return the parameters of the heads in a range of rows, float32 [heads, cols].

        Return None unless heads have separate parameters.  The range is one of `split_rows`: complete tokens, or
        some heads of one token.
        """
        if self._of_heads is None:
            return None
        # Not `len`, which is Python's function for a tensor.
        heads, rows = self._of_heads.shape[0], piece.stop - piece.start
        if rows >= heads:
            return _cast_with_offset(self._of_heads, self._offset)
        first = piece.start % heads
        return _cast_with_offset(self._of_heads[first : first + rows], self._offset)

    def get_for_rows(self, piece: slice) -> Tensor | None:
        """Return the parameter of some rows: `common`, or those of their heads."""
        return self.common if self._of_heads is None else self.slice_heads(piece)


def _cast_with_offset(tensor: Tensor, offset: float) -> Tensor:
    """Compute tensor + offset in float32; the tensor itself stays unchanged."""
    wide = tensor.float()
    if not offset:
        return wide
    return wide + offset if wide is tensor or wide.data_ptr() == tensor.data_ptr() else wide.add_(offset)


def _apply_affine_(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Compute y * weight + bias of rows [rows, cols] in y's memory.

    Parameters are [cols], or [heads, cols] and repeated for each token.
    """
    if weight is not None:
        _view_by_head(y, weight).mul_(weight)
    if bias is not None:
        _view_by_head(y, bias).add_(bias)


def _multiply_by_weight(y: Tensor, weight: Tensor) -> Tensor:
    """Compute y * weight of rows [rows, cols]; a weight [heads, cols] is repeated for each token."""
    if weight.ndim == 1 or weight.shape == y.shape:
        return y * weight
    return (_view_by_head(y, weight) * weight).view(y.shape)


def _view_by_head(y: Tensor, parameter: Tensor) -> Tensor:
    """View y as [tokens, heads, cols] if the parameter is [heads, cols]; the memory is shared."""
    return y if parameter.ndim == 1 or parameter.shape == y.shape else y.view(-1, *parameter.shape)
