"""The devices of tensors, including one that is not present."""

from functools import cache
from statistics import median

import torch

from fusednorm.devices.device_properties import CPU, H200, GpuModel

_stand_in: GpuModel | None = None


def set_absent_gpu(gpu: GpuModel | None) -> None:
    """Set the GPU for which calls on meta tensors are planned; these calls only record their launches.

    A process that compiles kernels in advance for a GPU that is not present calls this function.  With None,
    the initial state, calls on meta tensors are refused.
    """
    global _stand_in
    _stand_in = gpu
    describe_device.cache_clear()


def is_absent_gpu(device: torch.device) -> bool:
    """Return whether tensors of the device are treated as tensors of an absent GPU."""
    return _stand_in is not None and device.type == "meta"


@cache
def describe_device(device: torch.device) -> GpuModel:
    """Return the properties of a device that determine how launches are planned.

    For the meta device these are the properties of the GPU set by `set_absent_gpu`, or of an H200.
    """
    if device.type != "cuda":
        return (_stand_in or H200) if device.type == "meta" else CPU
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return GpuModel(device.type, torch.cuda.get_device_capability(device), count)


@cache
def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Measure the bandwidth of copies on a CUDA device, in bytes per second, read plus written.

    This bandwidth is the limit for the library's kernels.  The result is the median of 20 timed copies of
    `nbytes`, which are made at the first call only.
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
