"""Execution of launches on a device."""

from collections.abc import Iterable

import torch

from fusednorm.launch import absent, prepared
from fusednorm.launch.launch import Launch


def run(device: torch.device, launches: Iterable[Launch]) -> None:
    """Launch in order on the device's current stream; for an absent GPU, record the launches."""
    if device.type == "meta":
        absent.note(launches)
        return
    index = device.index if device.type == "cuda" else -1
    if index < 0 or index == torch.cuda.current_device():
        _start(launches, index)
    else:
        with torch.cuda.device(index):
            _start(launches, index)


def _start(launches: Iterable[Launch], index: int) -> None:
    for launch in launches:
        prepared.start(launch.kernel, launch.grid, launch.arguments, launch.options, index)
