"""Device properties that plans use, also of a device that is not present; cached."""

from functools import cache
from statistics import median
from typing import NamedTuple

import torch

try:
    from triton import knobs
except ModuleNotFoundError:
    HAS_TRITON = INTERPRETED = False
else:
    HAS_TRITON, INTERPRETED = True, bool(knobs.runtime.interpret)
"""Whether Triton is installed, which all kernels need; and whether kernels run in its interpreter, on CPU tensors
(TRITON_INTERPRET=1 at import), to which only tests add what it lacks."""


def needs_triton(what: str) -> ModuleNotFoundError:
    """The error of a call that runs kernels if Triton is not installed."""
    return ModuleNotFoundError(
        f"{what} runs Triton kernels, and Triton is not installed: install the package triton", name="triton"
    )


class Gpu(NamedTuple):
    """The properties of a GPU that plans use.

    Attributes:
        name: the name of the model.
        capability: its compute capability, major and minor.
        multiprocessors: the number of its multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def arch(self) -> int:
        """The compute capability in the notation of compilers: 90 for 9.0."""
        major, minor = self.capability
        return 10 * major + minor


H200 = Gpu("H200", (9, 0), 132)

_stand_in: Gpu | None = None


def stand_in(gpu: Gpu | None) -> None:
    """Treat meta tensors as tensors of an absent GPU: calls on them record their launches (`launch.absent`).

    For a process that compiles in advance.  With None, the initial state, such calls are refused.
    """
    global _stand_in
    _stand_in = gpu
    multiprocessor_count.cache_clear()
    since_hopper.cache_clear()


def stands_in(device: torch.device) -> bool:
    """Whether tensors of the device are treated as tensors of an absent GPU."""
    return _stand_in is not None and device.type == "meta"


def _absent() -> Gpu:
    """The GPU for which calls on meta tensors are planned: that of `stand_in`, or an H200, for inspection."""
    return _stand_in or H200


@cache
def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; for meta those of the absent GPU, for a CPU a small number."""
    if device.type != "cuda":
        return _absent().multiprocessors if device.type == "meta" else 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def since_hopper(device: torch.device) -> bool:
    """Whether the device has the features of compute capability 9.0: bulk prefetches into L2, and launches of a
    kernel before the kernel that it depends on ends."""
    if device.type != "cuda":
        return device.type == "meta" and _absent().capability >= (9, 0)
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of a copy of `nbytes` on the device: the limit for this library.

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
