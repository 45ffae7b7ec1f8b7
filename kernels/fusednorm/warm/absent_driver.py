"""A replacement for Triton's active driver, so that Triton compiles for a GPU that is not present."""

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from fusednorm.devices.device_properties import GpuModel

_THREADS_OF_A_WARP = 32


class AbsentDriver:
    """Replacement for Triton's driver with which kernels are compiled for GPUs that are not present.

    Each GPU is a device, and `current` is the index of the current device.  The driver launches nothing.
    """

    def __init__(self, gpus: Sequence[GpuModel]) -> None:
        self._gpus = gpus
        self.current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpus[self.current].arch, _THREADS_OF_A_WARP)

    def get_current_stream(self, device: int) -> int:
        return 0


def build_launcher(kernel: Any) -> None:
    """Compile a kernel's launcher, a C stub that Triton before version 3.7 needs, into Triton's cache.

    Without CUDA's driver, or if the compilation fails, nothing is done: Triton compiles the stub at the
    first launch.
    """
    if hasattr(nvidia, "make_launcher") and _has_driver():
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


@functools.cache
def _has_driver() -> bool:
    """Return whether CUDA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
