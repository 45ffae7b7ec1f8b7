"""Properties of a device that plans use, also of a device that is not present; cached."""

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
"""Whether Triton is installed, without which there are no kernels; and whether kernels run in its interpreter, on
CPU tensors (TRITON_INTERPRET=1 at import)."""


def needs_triton(what: str) -> ModuleNotFoundError:
    """The error of a call that runs kernels where Triton is not installed."""
    return ModuleNotFoundError(
        f"{what} runs Triton kernels, and Triton is not installed: install the package triton", name="triton"
    )


class Gpu(NamedTuple):
    """A GPU as plans see it.

    Attributes:
        name: of the model.
        capability: its compute capability, major and minor.
        multiprocessors: how many it has.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def arch(self) -> int:
        """The compute capability as compilers write it: 90 for 9.0."""
        major, minor = self.capability
        return 10 * major + minor


H200 = Gpu("H200", (9, 0), 132)

_stand_in: Gpu | None = None


def stand_in(gpu: Gpu | None) -> None:
    """Take meta tensors for those of an absent GPU: calls on them note their launches (`launch.absent`).

    For a process that compiles ahead.  With None, as at first, such calls are refused.
    """
    global _stand_in
    _stand_in = gpu
    multiprocessor_count.cache_clear()
    since_hopper.cache_clear()


def stands_in(device: torch.device) -> bool:
    """Whether tensors of the device are taken for those of an absent GPU."""
    return _stand_in is not None and device.type == "meta"


def _absent() -> Gpu:
    """What tensors of meta are planned for: an H200 for inspection, unless another one was named."""
    return _stand_in or H200


@cache
def multiprocessor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; those of an absent one for meta, and few of a CPU."""
    if device.type != "cuda":
        return _absent().multiprocessors if device.type == "meta" else 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def since_hopper(device: torch.device) -> bool:
    """Whether the device has what came with compute capability 9.0: bulk prefetches into L2, and launches of a
    kernel before the one that it depends on ends."""
    if device.type != "cuda":
        return device.type == "meta" and _absent().capability >= (9, 0)
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of a copy of `nbytes` on the device: the roof of this library.

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
