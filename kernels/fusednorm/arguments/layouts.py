"""The two memory layouts of samples: contiguous, [N, C, *spatial], and channels-last, [N, *spatial, C]."""

import math

from fusednorm.arguments.arrays import Array, has_dense_strides, merge_axes
from fusednorm.errors import UnsupportedShapeError


def detect_channels_last(x: Array, name: str = "x") -> bool:
    """Return whether x [N, C, *spatial] is stored as [N, *spatial, C] rather than contiguous.

    An array that is both (one channel, or one position) counts as contiguous: its memory order is the same.

    Raises:
        UnsupportedShapeError: x has neither layout, so it would have to be copied.
    """
    if x.is_dense:
        return False
    if len(x.shape) > 2 and has_layout(x, True):
        return True
    raise UnsupportedShapeError(
        f"{name} must be contiguous or channels-last, got shape {list(x.shape)} with strides {list(x.strides)}"
    )


def has_layout(array: Array, channels_last: bool) -> bool:
    """Return whether an array [N, C, *spatial] is channels-last, or contiguous if not `channels_last`.

    An array may have both layouts.
    """
    if not channels_last:
        return array.is_dense
    return has_dense_strides(_move_channels(array.shape), _move_channels(array.strides))


def move_channels_last(array: Array) -> Array:
    """Describe an array [N, C, *spatial] as its view [N, *spatial, C]."""
    shape, strides = _move_channels(array.shape), _move_channels(array.strides)
    is_dense = has_dense_strides(shape, strides)
    return Array(array.memory, array.dtype, shape, strides, array.device, is_dense, array.is_aligned, array.offset)


def has_channel_rows(array: Array) -> bool:
    """Return whether the channels of each position of [N, C, *spatial] are adjacent, as in rows.

    Positions are one constant stride apart, at least their channels' size.
    """
    shape, strides = _move_channels(array.shape), _move_channels(array.strides)
    if has_dense_strides(shape, strides):
        return True
    stride = merge_axes(shape[:-1], strides[:-1])
    # Closer positions overlap, as of an expanded tensor, whose memory format says nothing about results.
    are_apart = stride is not None and (stride >= shape[-1] or math.prod(shape[:-1]) < 2)
    return are_apart and (shape[-1] == 1 or strides[-1] == 1)


def _move_channels(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Permute sizes or strides of [N, C, *spatial] to the order [N, *spatial, C]."""
    return (sizes[0], *sizes[2:], sizes[1])
