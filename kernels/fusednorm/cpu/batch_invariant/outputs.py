"""The results of a forward pass over rows, and their memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from fusednorm.cpu.float8 import scale_rows_
from fusednorm.cpu.supported_arguments import add_residual
from fusednorm.results import Forward

WHOLE_ELEMENTS = 256 * 1024
"""The number of elements above which y is written to memory that the caller provides.

Smaller memory is retained by malloc, and nothing is copied; larger memory would be returned to the system after
each call.
"""


def is_small_result(x: Tensor) -> bool:
    """Return whether torch may allocate the memory for a result of this size."""
    return x.numel() <= WHOLE_ELEMENTS


class RowResults:
    """The results of a forward pass, written piece by piece."""

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
        *,
        stats: bool,
        centred: bool,
        memory_like: Callable[[Tensor], Tensor],
    ) -> None:
        """Args:
        stats: whether to store mean and rstd; the mean only with `centred`.
        memory_like: see `layer_norm_forward`.
        """
        self._x = flatten_rows(x)
        self._residual = None if residual is None else flatten_rows(residual)
        self.rows, self.cols = self._x.shape
        is_given = out_dtype in (None, x.dtype) and not is_small_result(x)
        self._y = memory_like(x) if is_given else torch.empty_like(x, dtype=out_dtype)
        self._y_rows = flatten_rows(self._y)
        self._residual_out = None if residual is None else torch.empty_like(residual)
        self._sum_rows = None if self._residual_out is None else flatten_rows(self._residual_out)
        is_float8 = out_dtype == torch.float8_e4m3fn
        self._scale = x.new_empty(x.shape[:-1], dtype=torch.float32) if is_float8 else None
        self._rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if stats else None
        self._mean = x.new_empty(x.shape[:-1], dtype=torch.float32) if stats and centred else None

    def add_residual(self, piece: slice) -> Tensor:
        """Compute x + residual of some rows in float32, and write it to residual_out."""
        h = add_residual(self._x[piece], None if self._residual is None else self._residual[piece])
        if self._sum_rows is not None:
            self._sum_rows[piece] = h
        return h

    def write_chunk(self, piece: slice, y: Tensor, mean: Tensor | None, rstd: Tensor | None) -> None:
        """Round y [rows, cols] to its type; mean and rstd are [rows, 1]."""
        if self._scale is not None:
            self._scale.view(-1)[piece] = scale_rows_(y)
        self._y_rows[piece] = y
        if self._rstd is not None and rstd is not None:
            self._rstd.view(-1)[piece] = rstd[:, 0]
        if self._mean is not None and mean is not None:
            self._mean.view(-1)[piece] = mean[:, 0]

    def get_result(self) -> Forward:
        """Return the written results."""
        return Forward(self._y, self._mean, self._rstd, self._residual_out, self._scale)


def flatten_rows(t: Tensor) -> Tensor:
    """View [rows, cols] or [tokens, heads, cols] as [rows, cols]."""
    return t if t.ndim == 2 else t.flatten(0, 1)
