"""Launches of compiled kernels that avoid Triton's lookup.

For each launch Triton binds all parameters by name and builds a string of all options to look up the kernel, which
costs the host several times as much as the driver call.  Here a kernel is found by the values that Triton's lookup
depends on, and is called as `triton.runtime.jit.JITFunction.run` of Triton 3.6 to 3.9 calls it, with addresses
instead of tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fusednorm.arguments.arrays import ITEMSIZES, Array
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch.driver import DriverLauncher, find_launcher
from fusednorm.launch.keys import compute_stable_key
from fusednorm.launch.launches import Launch
from fusednorm.launch.memories import PlanTensors

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PreparedKernel:
    """A compiled kernel, with all values that its launch needs besides grid, stream and arguments.

    Attributes:
        launcher: the function that launches it.
        constants: its constexprs, which are its last parameters.
        get_stream: returns the driver's handle of the current stream for a device index.
        compiled_kernel: the object that keeps the driver's handle valid.
    """

    launcher: DriverLauncher
    constants: tuple[Any, ...]
    get_stream: Any
    compiled_kernel: Any


# As many as Triton's compiled kernels, or a few times more where `_make_key` distinguishes more; so bounded too.
_PREPARED: dict[Key, PreparedKernel] = {}

# For each parameter, the properties of an integer on which Triton's choice depends; by the function of a kernel.
_LOOKS: dict[Any, tuple[str, ...]] = {}


def can_bypass_triton() -> bool:
    """Return whether Triton can be bypassed: no hook observes launches or changes how kernels are compiled."""
    runtime = knobs.runtime
    try:
        watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    except AttributeError:  # A hook that is not a chain of hooks.
        return False
    return not (
        watched or runtime.debug or runtime.add_stages_inspection_hook or knobs.compilation.instrumentation_mode
    )


def launch_kernel(launch: Launch, memories: PlanTensors, device: int) -> None:
    """Launch on the current stream of the current device, which has index `device`; compiles at the first use."""
    if INTERPRETED or not can_bypass_triton():
        _launch_through_triton(launch, memories)
        return
    key, values = _make_key(launch, device, memories)
    prepared = _PREPARED.get(key)
    if prepared is None:
        compiled = _launch_through_triton(launch, memories)
        if isinstance(compiled, CompiledKernel):
            _PREPARED[key] = _prepare_kernel(launch.kernel, compiled, len(launch.arguments), launch.options)
        return
    x, y, z, *_ = (*launch.grid, 1, 1)
    call, head, packed = prepared.launcher
    parameters = (*values, *prepared.constants)
    call(x, y, z, prepared.get_stream(device), *head, *((parameters,) if packed else parameters))


def find_prepared(launch: Launch, device: int) -> PreparedKernel | None:
    """Return the prepared kernel of a launch, or None if there is none for the device of that index."""
    return None if INTERPRETED else _PREPARED.get(_make_key(launch, device)[0])


def _launch_through_triton(launch: Launch, memories: PlanTensors) -> Any:
    compute_stable_key(launch.kernel)
    # Set explicitly: later versions of Triton change this default, which changes the last bits of results.
    return launch.kernel[launch.grid](*memories.bind(launch.arguments), enable_fp_fusion=True, **launch.options)


def _prepare_kernel(kernel: Any, compiled: Any, arguments: int, options: Mapping[str, Any]) -> PreparedKernel:
    constants = tuple(options[parameter.name] for parameter in kernel.params[arguments:])
    run = compiled.run  # Loads the kernel: only now it has a handle.
    launcher = find_launcher(run, compiled.function, compiled.packed_metadata)
    return PreparedKernel(launcher, constants, driver.active.get_current_stream, compiled)


def _make_key(launch: Launch, device: int, memories: PlanTensors | None = None) -> tuple[Key, list[Any]]:
    """Make the key by which Triton chooses the compiled kernel.

    With `memories`, also the parameters of the launch.
    """
    # Not the kernel object, whose hash is computed from its source.
    kernel = launch.kernel
    function = kernel.fn
    looks = _LOOKS.get(function)
    if looks is None:
        looks = _LOOKS[function] = tuple(_find_integer_properties(parameter) for parameter in kernel.params)
    kinds, values = _describe_arguments(looks, launch.arguments, memories)
    return (function, device, tuple(kinds), tuple(launch.options.items())), values


def _describe_arguments(
    looks: Iterable[str], arguments: tuple[Any, ...], memories: PlanTensors | None
) -> tuple[list[Any], list[Any]]:
    kinds: list[Any] = []
    values: list[Any] = []
    for look, value in zip(looks, arguments, strict=False):
        kind = type(value)
        if value is None:
            kinds.append(None)
        elif kind is int:
            kinds.append(int if look == "type" else _classify_integer(value, look))
        elif kind is Array:
            kinds.append((value.dtype, value.is_aligned))
            if memories is not None:
                address = memories[value.memory].data_ptr()
                values.append(address + value.offset * ITEMSIZES[value.dtype] if value.offset else address)
            continue
        elif kind is float:
            kinds.append(float)
        elif kind is tuple:
            inner_kinds, inner_values = _describe_arguments((look,) * len(value), value, memories)
            kinds.append(tuple(inner_kinds))
            values.append(tuple(inner_values))
            continue
        else:
            kinds.append((kind, value))
        values.append(value)
    return kinds, values


def _find_integer_properties(parameter: Any) -> str:
    """Return the properties of an integer that Triton uses.

    "type" if declared, else "width", or also its "value".
    """
    if not parameter.do_not_specialize:
        return "value"
    return "type" if parameter.annotation_type else "width"


def _classify_integer(value: int, look: str) -> Any:
    width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else -64
    return width if look == "width" else (width, value == 1, value % 16 == 0)
