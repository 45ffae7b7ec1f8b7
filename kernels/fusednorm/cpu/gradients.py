"""Gradients of rows, computed in float32 in pieces."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fusednorm.cpu.chunks import compute_chunk_rows, split_rows
from fusednorm.cpu.supported_arguments import add_residual, cast_gradient
from fusednorm.results import Backward


class ChunkedRowGradients:
    """The results of a backward pass; 16-bit tensors and sums are widened, used and narrowed in pieces."""

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
        self._has_own_dresidual = residual is not None and residual.dtype != x.dtype
        self._dweight: Tensor | None = None
        self._dbias: Tensor | None = None
        self._chunk = slice(0)

    def iterate_chunks(
        self, dy: Tensor, mean: Tensor, rstd: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield h and dy, [rows, cols], mean and rstd, [rows, 1], all float32, of one piece after another."""
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
        """Store the gradients of the last piece."""
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
