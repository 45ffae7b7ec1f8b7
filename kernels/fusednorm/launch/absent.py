"""Launches for a GPU that is not present: they are recorded in order instead of being made."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fusednorm.devices.device import Gpu, stand_in
from fusednorm.launch.launch import Launch

_noted: list[Launch] = []


def note(launches: Iterable[Launch]) -> None:
    """Record launches that a call on meta tensors would make."""
    _noted.extend(launches)


@contextmanager
def launches_for(gpu: Gpu) -> Iterator[list[Launch]]:
    """In this context, calls on meta tensors are planned for `gpu`; yields the list that records their launches."""
    stand_in(gpu)
    _noted.clear()
    try:
        yield _noted
    finally:
        stand_in(None)
