"""Launches for a GPU that is not present: they are recorded in order instead of being made."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fusednorm.devices.device import Gpu, stand_in
from fusednorm.launch.launch import Launch

_noted: list[Launch] = []


def note(launches: Iterable[Launch]) -> None:
    """Keep launches that a call on meta tensors would make."""
    _noted.extend(launches)


@contextmanager
def launches_for(gpu: Gpu) -> Iterator[list[Launch]]:
    """Calls on meta tensors are calls on such a GPU, as long as this lasts; their launches, as they come."""
    stand_in(gpu)
    _noted.clear()
    try:
        yield _noted
    finally:
        stand_in(None)
