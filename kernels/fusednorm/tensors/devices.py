"""The devices of tensors, including one that is not present."""

from functools import cache
from statistics import median

import torch

from fusednorm.devices.device_properties import CPU, H200, GpuModel

_stand_in: GpuModel | None = None


def stand_in(gpu: GpuModel | None) -> None:
    """Treat meta tensors as tensors of an absent GPU: calls on them record their launches.

    For a process that compiles in advance (`launch.recorded_launches`).  With None, the initial state, such calls
    are refused.
    """
    global _stand_in
    _stand_in = gpu
    describe_device.cache_clear()


def stands_in(device: torch.device) -> bool:
    """Return whether tensors of the device are treated as tensors of an absent GPU."""
    return _stand_in is not None and device.type == "meta"


@cache
def describe_device(device: torch.device) -> GpuModel:
    """Return the properties of a tensor's device that plans use.

    Calls on meta tensors are planned for the GPU of `stand_in`, or for an H200, for inspection.
    """
    if device.type != "cuda":
        return (_stand_in or H200) if device.type == "meta" else CPU
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return GpuModel(device.type, torch.cuda.get_device_capability(device), count)


@cache
def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Return bytes per second, read plus written, of a copy of `nbytes` on the device: the library's limit.

    Median of 20 timed copies, measured at the first call.  CUDA only.
    """
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times_ms: list[float] = []
    with torch.cuda.device(device):
        for _ in range(23):
            start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return 2 * nbytes / (median(times_ms[3:]) * 1e-3)
