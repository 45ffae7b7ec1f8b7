"""The properties of a device that plans use."""

from typing import NamedTuple

try:
    from triton import knobs
except ModuleNotFoundError:
    HAS_TRITON = INTERPRETED = False
else:
    HAS_TRITON, INTERPRETED = True, bool(knobs.runtime.interpret)
"""Whether Triton is installed, which all kernels need; and whether kernels run in its interpreter, on CPU tensors
(TRITON_INTERPRET=1 at import), to which only tests add what it lacks."""


def make_missing_triton_error(what: str) -> ModuleNotFoundError:
    """Make the exception for a call that would run kernels while Triton is not installed.

    The argument is the subject of the message, such as "layer_norm of a tensor on cuda:0".
    """
    return ModuleNotFoundError(
        f"{what} runs Triton kernels, and Triton is not installed: install the package triton", name="triton"
    )


class GpuModel(NamedTuple):
    """The properties of a GPU that determine how launches are planned.

    Attributes:
        name: the name of the model.
        capability: its compute capability, major and minor.
        multiprocessors: the number of its multiprocessors.
        has_launch_options: whether launches may be cooperative, and may start before the previous kernel ends;
            False if the library that launches the kernels has no such options.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    has_launch_options: bool = True

    @property
    def arch(self) -> int:
        """The compute capability in the notation of compilers: 90 for 9.0."""
        major, minor = self.capability
        return 10 * major + minor


H200 = GpuModel("H200", (9, 0), 132)
CPU = GpuModel("CPU", (0, 0), 2)
"""The device of interpreted kernels, with few multiprocessors, so that few programs run."""


def count_multiprocessors(device: GpuModel) -> int:
    """Return the number of a device's streaming multiprocessors."""
    return device.multiprocessors


def is_hopper_or_newer(device: GpuModel) -> bool:
    """Return whether the device has the features of compute capability 9.0.

    These are bulk prefetches into L2, and launches of a kernel before the kernel that it depends on ends.
    """
    return device.capability >= (9, 0)


def can_start_early(device: GpuModel) -> bool:
    """Return whether a kernel may start before the previous kernel ends."""
    return device.has_launch_options and is_hopper_or_newer(device)
