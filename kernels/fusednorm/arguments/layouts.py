"""The two memory layouts of samples: contiguous, [N, C, *spatial], and channels-last, [N, *spatial, C]."""

import torch
from torch import Tensor

from fusednorm.errors import UnsupportedShapeError


def is_channels_last(x: Tensor, name: str = "x") -> bool:
    """Whether x [N, C, *spatial] is stored as [N, *spatial, C]; False if it is contiguous.

    A tensor that is both (one channel, or one position) counts as contiguous: its memory order is the same.

    Raises:
        UnsupportedShapeError: x has neither layout, so it would have to be copied.
    """
    if x.is_contiguous():
        return False
    if x.dim() > 2 and x.permute(0, *range(2, x.dim()), 1).is_contiguous():
        return True
    raise UnsupportedShapeError(
        f"{name} must be contiguous or channels-last, got shape {list(x.shape)} with strides {list(x.stride())}"
    )


def lies_otherwise(tensor: Tensor | None, channels_last: bool) -> bool:
    """Whether a tensor is in the other layout than x, whose layout is `channels_last`; False for None."""
    return tensor is not None and not in_layout(tensor, channels_last)


def in_layout(tensor: Tensor, channels_last: bool) -> bool:
    """Whether [N, C, *spatial] is stored in the given layout; a tensor may have both layouts."""
    if channels_last:
        tensor = tensor.permute(0, *range(2, tensor.dim()), 1)
    return tensor.is_contiguous()


def laid_out(tensor: Tensor, channels_last: bool) -> Tensor:
    """[N, C, *spatial] in the given layout; always a copy for channels-last, else only if not contiguous."""
    if not channels_last:
        return tensor.contiguous()
    # Not `contiguous`, which keeps the strides of axes of one element.
    by_position = tensor.permute(0, *range(2, tensor.dim()), 1).clone(memory_format=torch.contiguous_format)
    return by_position.permute(0, -1, *range(1, tensor.dim() - 1))
