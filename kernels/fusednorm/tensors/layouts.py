"""The two memory layouts of samples of tensors, which tracers see; `arguments.layouts` has those of any array."""

import math

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fusednorm.arguments.arrays import merge_axes
from fusednorm.errors import UnsupportedShapeError


def is_channels_last(x: Tensor, name: str = "x") -> bool:
    """Return whether x [N, C, *spatial] is stored as [N, *spatial, C] rather than contiguous.

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


def is_in_layout(tensor: Tensor, channels_last: bool) -> bool:
    """Return whether a tensor [N, C, *spatial] is channels-last, or contiguous if not `channels_last`.

    A tensor may have both layouts.
    """
    if channels_last:
        tensor = tensor.permute(0, *range(2, tensor.dim()), 1)
    return tensor.is_contiguous()


def has_channel_rows(tensor: Tensor) -> bool:
    """Return whether the channels of each position of [N, C, *spatial] are adjacent, as in rows.

    Positions are one constant stride apart, at least their channels' size: closer ones overlap.
    """
    rows = tensor.movedim(1, -1)
    if rows.is_contiguous():
        return True
    *sizes, channels = rows.shape
    *strides, last = rows.stride()
    stride = merge_axes(tuple(sizes), tuple(strides))
    are_apart = stride is not None and (stride >= channels or math.prod(sizes) < 2)
    return are_apart and (channels == 1 or last == 1)


def select_channels_last(x: Tensor) -> bool:
    """Return whether a norm over the channels of x has channels-last results, as x is.

    If x has both layouts or neither, the memory format decides that torch suggests for its strides.
    """
    is_contiguous, has_rows = x.is_contiguous(), has_channel_rows(x)
    if is_contiguous == has_rows:
        return suggests_channels_last(x)
    return has_rows


def suggests_channels_last(x: Tensor) -> bool:
    """Return whether torch's own functions have channels-last results for the strides of x, whatever these are."""
    return suggest_memory_format(x) is not torch.contiguous_format


def convert_to_layout(tensor: Tensor, channels_last: bool) -> Tensor:
    """Return a tensor [N, C, *spatial] as channels-last, or as contiguous if not `channels_last`.

    It is copied only if it has another layout.  Its strides are those of a new tensor, also along axes of
    one element.
    """
    # A trace may not know whether a size is 1.
    if all(type(size) is int and size != 1 for size in tensor.shape) and is_in_layout(tensor, channels_last):
        return tensor
    if channels_last:
        by_position = convert_to_layout(tensor.permute(0, *range(2, tensor.dim()), 1), False)
        return by_position.permute(0, -1, *range(1, tensor.dim() - 1))
    # Axes of one element may have any stride in a contiguous tensor, and torch chooses a layout by their strides.
    return tensor.contiguous().view(-1).view(tensor.shape)
