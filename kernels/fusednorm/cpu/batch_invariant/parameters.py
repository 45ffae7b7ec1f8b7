"""Weight and bias of rows: one vector for all rows, or one for each head."""

from torch import Tensor


class Parameter:
    """A weight or a bias; none at all is one, too.

    Attributes:
        common: [cols] in float32, where all rows have the same.
    """

    common: Tensor | None
    _of_heads: Tensor | None
    __slots__ = ("_of_heads", "_offset", "common")

    def __init__(self, tensor: Tensor | None, offset: float = 0.0) -> None:
        """Args:
        tensor: [cols] or [heads, cols], of any type.
        offset: is added to it in float32.
        """
        self.common = self._of_heads = None
        self._offset = offset
        if tensor is None:
            return
        if tensor.ndim == 2:
            self._of_heads = tensor
        else:
            self.common = _widened(tensor, offset) if offset else tensor.float()

    def own(self, piece: slice) -> Tensor | None:
        """What each of some rows has by its head, [rows, cols] in float32; None where all have the same.

        Args: piece: as `row_pieces` cuts them: whole tokens, or some heads of one.
        """
        if self._of_heads is None:
            return None
        heads, cols = self._of_heads.shape
        rows, first = piece.stop - piece.start, piece.start % heads
        of_token = _widened(self._of_heads[first : first + rows], self._offset)
        return of_token if rows <= heads else of_token.expand(rows // heads, heads, cols).reshape(rows, cols)

    def of(self, piece: slice) -> Tensor | None:
        """What some rows have: `common` or their own."""
        return self.common if self._of_heads is None else self.own(piece)


def affine_(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """y * weight + bias, in y's memory."""
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)


def add_gradient(total: Tensor, gradient: Tensor, piece: slice) -> None:
    """Add what rows give to the gradient of a parameter.

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


def _widened(tensor: Tensor, offset: float) -> Tensor:
    wide = tensor.float()
    if not offset:
        return wide
    return wide + offset if wide is tensor or wide.data_ptr() == tensor.data_ptr() else wide.add_(offset)
