"""The driver's launch function, called directly instead of through Triton's launcher of a compiled kernel.

`CudaLauncher.__call__` allocates scratch memory for kernels that need it, and otherwise passes on constants of the
launcher, which takes about as much Python time as the rest of a prepared launch.  The constants differ between
Triton 3.6 and 3.7 to 3.9, so they are determined once, by calling the launcher with a driver function that records
its arguments.
"""

from copy import copy
from typing import Any, NamedTuple

_GRID_AND_STREAM = (2, 3, 5, 7)
_PARAMETERS = (object(), object())


class DriverLauncher(NamedTuple):
    """The function that launches a compiled kernel, without hooks.

    Attributes:
        function: called with the grid's three sizes, the stream, `constant_arguments`, and then every parameter of
            the kernel.
        constant_arguments: the arguments that are the same at each launch.
        packs_parameters: whether the parameters are passed as one tuple.
    """

    function: Any
    constant_arguments: tuple[Any, ...]
    packs_parameters: bool


def find_launcher(run: Any, function: int, metadata: Any) -> DriverLauncher:
    """Find the fastest equivalent of Triton's `run(x, y, z, stream, function, metadata, ...)`."""
    head = (function, metadata, None, None, None)
    return _find_driver_function(run, head) or DriverLauncher(run, head, packs_parameters=False)


def _find_driver_function(run: Any, head: tuple[Any, ...]) -> DriverLauncher | None:
    """Find the driver function that `run` calls and its constant arguments; None if `run` does more."""
    if getattr(run, "global_scratch_size", None) != 0 or getattr(run, "profile_scratch_size", None) != 0:
        return None
    # Triton's sanitizer keeps state for each launch.
    if getattr(run, "gsan_enabled", False) or not hasattr(run, "launch"):
        return None
    noted: list[tuple[Any, ...]] = []
    probe = copy(run)
    probe.launch = lambda *arguments: noted.append(arguments)
    probe(*_GRID_AND_STREAM, *head, *_PARAMETERS)
    if len(noted) != 1 or noted[0][:4] != _GRID_AND_STREAM:
        return None
    passed = noted[0][4:]
    if passed[-1] == _PARAMETERS:
        return DriverLauncher(run.launch, passed[:-1], packs_parameters=True)
    if passed[-2:] == _PARAMETERS:
        return DriverLauncher(run.launch, passed[:-2], packs_parameters=False)
    return None
