"""Triton compiles for the GPU of its active driver; this one stands in for GPUs that are absent."""

from collections.abc import Sequence

from triton.backends.compiler import GPUTarget

from fusednorm.gpus import Gpu

_THREADS_OF_A_WARP = 32


class AbsentDriver:
    """Has as many devices as GPUs were named, one of them current, and launches nothing."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self.current = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpus[self.current].arch, _THREADS_OF_A_WARP)

    def get_current_stream(self, device: int) -> int:
        return 0
