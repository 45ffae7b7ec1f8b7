"""Execution of launches on a device."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fusednorm.launch import prepared_kernels, recorded_launches
from fusednorm.launch.launches import Launch
from fusednorm.launch.memories import PlanTensors


def run_launches(device: torch.device, launches: Iterable[Launch], tensors: Mapping[str, Tensor]) -> None:
    """Launch kernels in order on the device's current stream; for a meta device, only record the launches.

    Args:
        tensors: the call's inputs and results by name.
    """
    if device.type == "meta":
        recorded_launches.record_launches(launches)
        return
    memories = PlanTensors(device, tensors)
    index = device.index if device.type == "cuda" else -1
    if index < 0 or index == torch.cuda.current_device():
        _launch_in_order(launches, memories, index)
    else:
        with torch.cuda.device(index):
            _launch_in_order(launches, memories, index)


def _launch_in_order(launches: Iterable[Launch], memories: PlanTensors, index: int) -> None:
    for launch in launches:
        prepared_kernels.launch_kernel(launch, memories, index)
