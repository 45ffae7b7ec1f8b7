"""Launches for a GPU that is not present: they are recorded in order instead of being made."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusednorm.arguments.arrays import Array
from fusednorm.devices.device_properties import GpuModel
from fusednorm.launch.launches import Launch
from fusednorm.tensors.arrays import TORCH_DTYPES
from fusednorm.tensors.devices import stand_in

_noted: list[Launch] = []


def record_launches(launches: Iterable[Launch]) -> None:
    """Record launches that a call on meta tensors would make."""
    _noted.extend(launches)


@contextmanager
def recording_launches(gpu: GpuModel) -> Iterator[list[Launch]]:
    """Plan calls on meta tensors for `gpu` in this context; yields the list that records their launches."""
    stand_in(gpu)
    _noted.clear()
    try:
        yield _noted
    finally:
        stand_in(None)


def bind_to_nothing(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a launch's arguments with meta tensors in place of its arrays, to compile the launch.

    The meta tensors have the dtypes and alignments of the arrays.
    """
    return tuple(map(_bind_to_nothing, arguments))


def _bind_to_nothing(value: Any) -> Any:
    if isinstance(value, tuple):
        return bind_to_nothing(value)
    if not isinstance(value, Array):
        return value
    return torch.empty(1, dtype=TORCH_DTYPES[value.dtype], device="meta")[not value.is_aligned :]
