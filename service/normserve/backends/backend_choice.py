"""The choice of the backend on this machine."""

from collections.abc import Collection

from normserve.backends.interface import Backend
from normserve.errors import ConfigurationError
from normserve.memory.slabs import SlabPool


def make_backend_by_name(
    name: str, cpu_threads: int, slabs: SlabPool | None = None, warm_sizes: Collection[int] = (1024,)
) -> Backend:
    """Make the backend of that name: `triton` for CUDA, `torch` for the CPU; `auto` is triton if there is
    a CUDA device.

    Imports only the chosen backend, as each takes seconds to load.  For CUDA, also starts to compile
    kernels in the background.

    Raises:
        ConfigurationError: the name is triton and there is no CUDA device.
    """
    if name != "torch":
        from normserve.backends.cuda.background_compile import BackgroundCompiler

        ahead = BackgroundCompiler(warm_sizes)
        ahead.start()

        import torch

        if torch.cuda.is_available():
            from normserve.backends.cuda.backend import TritonBackend

            return TritonBackend(slabs, warm_sizes, ahead)
        ahead.stop()
        if name == "triton":
            raise ConfigurationError("the triton backend needs a CUDA device, torch sees none")
    from normserve.backends.cpu.backend import CpuBackend

    return CpuBackend(cpu_threads, slabs, warm_sizes)
