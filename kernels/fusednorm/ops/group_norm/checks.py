"""What GroupNorm alone asks of its input: a layout that it takes and groups that come out even."""

import torch
from torch import Tensor

from fusednorm.checks import check_shape, check_tensor, is_integer
from fusednorm.errors import KernelInputError, UnsupportedShapeError


def is_channels_last(x: Tensor, name: str = "x") -> bool:
    """Whether [N, C, *spatial] lies in memory as [N, *spatial, C]; False when it is plainly contiguous.

    A tensor that is both (one channel, or one position) counts as contiguous: its memory order is the same.

    Raises:
        UnsupportedShapeError: x is neither, so that it would have to be copied.
    """
    if x.is_contiguous():
        return False
    if x.dim() > 2 and x.permute(0, *range(2, x.dim()), 1).is_contiguous():
        return True
    raise UnsupportedShapeError(
        f"{name} must be contiguous or channels-last, got shape {list(x.shape)} with strides {list(x.stride())}"
    )


def lies_otherwise(tensor: Tensor | None, channels_last: bool) -> bool:
    """Whether a companion of x is in the other of the two layouts."""
    return tensor is not None and not in_layout(tensor, channels_last)


def in_layout(tensor: Tensor, channels_last: bool) -> bool:
    """Whether [N, C, *spatial] lies in memory as that layout has it; a tensor may be of both."""
    if channels_last:
        tensor = tensor.permute(0, *range(2, tensor.dim()), 1)
    return tensor.is_contiguous()


def laid_out(tensor: Tensor, channels_last: bool) -> Tensor:
    """[N, C, *spatial] in that layout: itself if it is contiguous as asked, else a copy."""
    if not channels_last:
        return tensor.contiguous()
    # Not `contiguous`, which leaves the strides of axes of one element as they are.
    by_position = tensor.permute(0, *range(2, tensor.dim()), 1).clone(memory_format=torch.contiguous_format)
    return by_position.permute(0, -1, *range(1, tensor.dim() - 1))


def check_groups(x: Tensor, num_groups: int) -> None:
    """Refuse what has no groups to normalise.

    Raises:
        KernelInputError: x has no channel axis, the number of groups is no int or does not divide the channels, or
            a group is empty.
    """
    shape = list(x.shape)
    if x.dim() < 2:
        raise KernelInputError(f"x must be [N, C, *spatial], got {shape}")
    if not is_integer(num_groups):
        raise KernelInputError(f"num_groups must be an int, got {num_groups!r}")
    if num_groups < 1 or shape[1] % num_groups:
        raise KernelInputError(
            f"num_groups must be at least 1 and divide C = {shape[1]}, got num_groups = {num_groups}"
        )
    if any(size == 0 for size in shape[1:]):
        raise KernelInputError(f"x must have at least one element in each group, got {shape}")


def check_scale_and_shift(scale: Tensor | None, shift: Tensor | None, x: Tensor) -> None:
    """Each [N, C] on x's device, or None; rows of contiguous channels, as far apart in one as in the other.

    Raises:
        KernelInputError: wrong dtype, device or shape.
        UnsupportedShapeError: channels that are not contiguous, or strides that differ.
    """
    strides = set()
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.device != x.device:
            raise KernelInputError(f"{name} must be on x's device {x.device}, got {tensor.device}")
        check_shape(name, tensor, x.shape[:2])
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise UnsupportedShapeError(
                f"the channels of {name} must be contiguous, got strides {list(tensor.stride())}"
            )
        strides.add(tensor.stride(0))
    if len(strides) > 1 and x.shape[0] > 1:
        raise UnsupportedShapeError(
            f"scale and shift must have one stride from sample to sample, got {sorted(strides)}"
        )
