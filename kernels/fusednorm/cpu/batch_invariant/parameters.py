"""Weight and bias of rows: one vector for all rows, or one for each head."""

from torch import Tensor


class RowParameter:
    """A weight or a bias, or the absence of one.

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
        """Return the parameters of a piece's heads, [heads, cols] in float32; None unless heads have separate ones.

        Args: piece: a range of `split_rows`: complete tokens, or some heads of one token.
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


def apply_affine_(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Compute y * weight + bias in y's memory; parameters [heads, cols] are repeated for each token."""
    if weight is not None:
        _view_by_head(y, weight).mul_(weight)
    if bias is not None:
        _view_by_head(y, bias).add_(bias)


def multiply_by_weight(y: Tensor, weight: Tensor) -> Tensor:
    """Compute y * weight; a weight [heads, cols] is repeated for each token."""
    if weight.ndim == 1 or weight.shape == y.shape:
        return y * weight
    return (_view_by_head(y, weight) * weight).view(y.shape)


def accumulate_parameter_gradient(total: Tensor, gradient: Tensor, piece: slice) -> None:
    """Add the contribution of some rows to the gradient of a parameter.

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


def _view_by_head(y: Tensor, parameter: Tensor) -> Tensor:
    """View y as [tokens, heads, cols] if the parameter is [heads, cols]; the memory is shared."""
    return y if parameter.ndim == 1 or parameter.shape == y.shape else y.view(-1, *parameter.shape)


def _cast_with_offset(tensor: Tensor, offset: float) -> Tensor:
    wide = tensor.float()
    if not offset:
        return wide
    return wide + offset if wide is tensor or wide.data_ptr() == tensor.data_ptr() else wide.add_(offset)
