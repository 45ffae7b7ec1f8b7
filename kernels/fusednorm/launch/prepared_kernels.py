"""Launches of compiled kernels that avoid Triton's lookup.

For each launch Triton binds all parameters by name and builds a string of all options to look up the kernel, which
costs the host several times as much as the driver call.  Here a kernel is found by the values that Triton's lookup
depends on, and is called as `triton.runtime.jit.JITFunction.run` of Triton 3.6 to 3.9 calls it, with addresses
instead of tensors.

The driver's launch function is called directly instead of through Triton's launcher of a compiled kernel.
`CudaLauncher.__call__` allocates scratch memory for kernels that need it, and otherwise passes on constants of the
launcher, which takes about as much Python time as all other steps of a prepared launch.  The constants differ
between Triton 3.6 and 3.7 to 3.9, so they are determined once, by calling the launcher with a driver function that
records its arguments.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fusednorm.arguments.arrays import ITEMSIZES, Array
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch.launches import Launch
from fusednorm.launch.memories import PlanTensors
from fusednorm.launch.stable_keys import store_stable_key

_GRID_AND_STREAM = (2, 3, 5, 7)
_PARAMETERS = (object(), object())

_Key = tuple[Any, ...]


class DriverLauncher(NamedTuple):
    """The most direct function that launches a compiled kernel, and its constant arguments.

    Attributes:
        function: called with the grid's three sizes, the stream, `constant_arguments`, and then every parameter of
            the kernel.
        constant_arguments: the arguments that are the same at each launch.
        packs_parameters: whether the parameters are passed as one tuple.
    """

    function: Any
    constant_arguments: tuple[Any, ...]
    packs_parameters: bool


@dataclass(frozen=True, slots=True)
class PreparedKernel:
    """A compiled kernel with all values that its launches have in common: all but grid, stream and arguments.

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
_PREPARED: dict[_Key, PreparedKernel] = {}

# For each parameter, the properties of an integer on which Triton's choice depends; by the function of a kernel.
_LOOKS: dict[Any, tuple[str, ...]] = {}


def launch_kernel(launch: Launch, memories: PlanTensors, device: int) -> None:
    """Launch a kernel on the current stream of the current device, whose index is `device`.

    Triton compiles the kernel at its first launch; later launches bypass Triton if `can_bypass_triton`.
    """
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


def can_bypass_triton() -> bool:
    """Return whether kernels may be launched without Triton's own code.

    They may if no hook observes launches or changes how kernels are compiled.
    """
    runtime = knobs.runtime
    try:
        watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    except AttributeError:  # A hook that is not a chain of hooks.
        return False
    return not (
        watched or runtime.debug or runtime.add_stages_inspection_hook or knobs.compilation.instrumentation_mode
    )


def _launch_through_triton(launch: Launch, memories: PlanTensors) -> Any:
    store_stable_key(launch.kernel)
    # Set explicitly: later versions of Triton change this default, which changes the last bits of results.
    return launch.kernel[launch.grid](*memories.bind(launch.arguments), enable_fp_fusion=True, **launch.options)


def _prepare_kernel(kernel: Any, compiled: Any, arguments: int, options: Mapping[str, Any]) -> PreparedKernel:
    """Make the PreparedKernel of a kernel that Triton has compiled.

    `arguments` is the number of its arguments; the parameters that follow are constexprs, with values in
    `options`.
    """
    constants = tuple(options[parameter.name] for parameter in kernel.params[arguments:])
    run = compiled.run  # Loads the kernel: only now it has a handle.
    launcher = find_launcher(run, compiled.function, compiled.packed_metadata)
    return PreparedKernel(launcher, constants, driver.active.get_current_stream, compiled)


def find_launcher(run: Any, function: int, metadata: Any) -> DriverLauncher:
    """Find the fastest equivalent of Triton's `run(x, y, z, stream, function, metadata, ...)`."""
    head = (function, metadata, None, None, None)
    return _find_driver_function(run, head) or DriverLauncher(run, head, packs_parameters=False)


def _find_driver_function(run: Any, head: tuple[Any, ...]) -> DriverLauncher | None:
    """Find the driver function that Triton's `run` calls, and its constant arguments; None if `run` does more.

    A copy of `run` is called with a function that records its arguments in place of the driver function.
    """
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


def _make_key(launch: Launch, device: int, memories: PlanTensors | None = None) -> tuple[_Key, list[Any]]:
    """Make the key of a launch: the properties of its arguments by which Triton selects the compiled kernel.

    Also return the values of the launch's parameters, with addresses in place of arrays.  Without `memories`
    the addresses are left out.
    """
    # Not the kernel object, whose hash is computed from its source.
    kernel = launch.kernel
    function = kernel.fn
    looks = _LOOKS.get(function)
    if looks is None:
        looks = _LOOKS[function] = tuple(_select_integer_key_property(parameter) for parameter in kernel.params)
    kinds, values = _describe_arguments(looks, launch.arguments, memories)
    return (function, device, tuple(kinds), tuple(launch.options.items())), values


def _describe_arguments(
    integer_classes: Iterable[str], arguments: tuple[Any, ...], memories: PlanTensors | None
) -> tuple[list[Any], list[Any]]:
    """Return each argument's part of the launch's key, and the arguments with addresses in place of arrays.

    Without `memories` the addresses are left out.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for look, value in zip(integer_classes, arguments, strict=False):
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


def _select_integer_key_property(parameter: Any) -> str:
    """Return the property of an integer parameter that selects the compiled kernel: "value", "width" or "type".

    It is "value" unless Triton must not specialise the kernel for the parameter (do_not_specialize).  Then
    it is "type" if the parameter has a declared type, else "width", the number of bits of the integer.
    """
    if not parameter.do_not_specialize:
        return "value"
    return "type" if parameter.annotation_type else "width"


def _classify_integer(value: int, look: str) -> Any:
    width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else -64
    return width if look == "width" else (width, value == 1, value % 16 == 0)
