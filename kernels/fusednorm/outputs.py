"""Where results are written: new tensors, or those that the caller gives."""

import torch
from torch import Tensor

from fusednorm.errors import KernelInputError
from fusednorm.layouts import in_layout
from fusednorm.results import Backward, Forward


def is_room_for(given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a contiguous result may be written to a tensor."""
    return (
        given.dtype == dtype
        and given.shape == shape
        and given.device == device
        and given.is_contiguous()
        and not given.is_neg()
    )


def room(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> Tensor:
    """A contiguous tensor of that shape and dtype on x's device: a new one, or `given`.

    Raises:
        KernelInputError: `given` is none.
    """
    if given is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    if not is_room_for(given, shape, dtype, x.device):
        raise KernelInputError(
            f"out.{name} must be contiguous {dtype} {list(shape)} on {x.device}, "
            f"got {given.dtype} {list(given.shape)} with strides {list(given.stride())} on {given.device}"
        )
    return given


def room_like(name: str, given: Tensor | None, x: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """A tensor of x's shape, x's layout and that dtype: a new one, or `given`.

    Raises:
        KernelInputError: `given` is none.
    """
    if given is None:
        return torch.empty_like(x, dtype=dtype)
    fits = given.dtype == dtype and given.shape == x.shape and given.device == x.device and not given.is_neg()
    if not (fits and in_layout(given, channels_last)):
        raise KernelInputError(
            f"out.{name} must be {dtype} {list(x.shape)} on {x.device}, laid out as x, "
            f"got {given.dtype} {list(given.shape)} with strides {list(given.stride())} on {given.device}"
        )
    return given


def refuse_unreturned(out: Forward | Backward | None, result: Forward | Backward) -> None:
    """What is given is written to, or it is an error.

    Raises:
        KernelInputError: `out` has a tensor where `result` has none, or another.
    """
    for name, given in () if out is None else out._asdict().items():
        if given is not None and given is not getattr(result, name):
            raise KernelInputError(f"out.{name} must be None: this call returns no tensor of its own there")
