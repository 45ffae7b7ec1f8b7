"""Launches for a GPU that is not present: they are recorded in order instead of being made."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import GpuModel
from fusednorm.launch.launches import Launch
from fusednorm.tensors.arrays import TORCH_DTYPES
from fusednorm.tensors.devices import set_absent_gpu

_noted: list[Launch] = []


def record_launches(launches: Iterable[Launch]) -> None:
    """Record launches that a call on meta tensors would make."""
    _noted.extend(launches)


@contextmanager
def recording_launches(gpu: GpuModel) -> Iterator[list[Launch]]:
    """Record the launches of calls on meta tensors in this context, and yield the list of launches.

    The calls are planned for `gpu`.
    """
    set_absent_gpu(gpu)
    _noted.clear()
    try:
        yield _noted
    finally:
        set_absent_gpu(None)


def bind_to_meta_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the arrays in a launch's arguments by meta tensors, with which the kernel can be compiled.

    The meta tensors have the dtypes and alignments of the arrays.
    """
    return tuple(map(_bind_value_to_meta_tensors, arguments))


def _bind_value_to_meta_tensors(value: Any) -> Any:
    """Replace an argument that is an array, or the arrays in a tuple, by meta tensors."""
    if isinstance(value, tuple):
        return bind_to_meta_tensors(value)
    if not isinstance(value, Array):
        return value
    return torch.empty(1, dtype=TORCH_DTYPES[value.dtype], device="meta")[not value.is_aligned :]
