"""The connection to the host extension: registers repeated calls with it, if it is available."""

import struct
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.arrays import contiguous_strides
from fusednorm.arguments.outputs import Outputs, OutputSpec
from fusednorm.host.background_build import BackgroundBuild, explain_absence
from fusednorm.host.extension_files import ExtensionFiles
from fusednorm.launch.launch_template import LaunchTemplate, PreparedLaunch
from fusednorm.launch.memories import get_or_allocate_stream_workspace
from fusednorm.tensors.arrays import TORCH_DTYPES

Parameter = tuple[bool, int]
"""Whether a kernel's parameter is a constant, and the constant's bits or the parameter's slot."""

_FIXED, _AS_X, _AS_ROWS = range(3)
"""The codes for the shape of a result in the extension."""


GradientFunction = Callable[..., tuple[Tensor | None, ...]]
"""A function that computes the gradients of a differentiable call."""

_files = ExtensionFiles()
_build = BackgroundBuild(_files)
_load_error = ""
_gradient_function: GradientFunction | None = None


def set_gradient_function(compute_gradients: GradientFunction) -> None:
    """Set the function by which the extension computes gradients if it has not recorded a backward pass.

    The module of differentiable calls sets it, so that processes without such calls need not import that module.
    """
    global _gradient_function
    _gradient_function = compute_gradients


def _compute_gradients(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Compute gradients by the function that has been set."""
    assert _gradient_function is not None, "the module of differentiable calls sets it"
    return _gradient_function(*arguments)


def load_extension(max_kinds: int, may_start_build: bool = False) -> Any:
    """Load the host extension and configure it; None if it is not compiled, or cannot be loaded.

    If loading fails, the first call warns, and later calls return None at once.

    Args:
        max_kinds: the largest number of calls that it records.
        may_start_build: whether to start a build in the background if the extension is not compiled.
    """
    global _load_error
    if _load_error or _build.is_running():
        return None
    try:
        extension = _files.try_load_compiled_module()
        if extension is not None:
            configure_extension(extension, _compute_gradients, max_kinds)
    except (ImportError, OSError, RuntimeError) as error:
        _load_error = str(error)
        warnings.warn(f"the host extension does not load, so calls cost more host time: {error}", stacklevel=2)
        return None
    if extension is None and may_start_build:
        _build.start_if_needed()
    return extension


def find_extension_status() -> tuple[bool, str]:
    """Return whether the host extension can be loaded, and its path or the reason why it cannot."""
    if _load_error:
        return False, f"the host extension does not load: {_load_error}"
    try:
        path = _files.find_compiled()
    except OSError as error:
        return False, f"the host extension does not load: {error}"
    return (False, explain_absence(_files)) if path is None else (True, str(path))


def configure_extension(
    extension: Any,
    compute_gradients: GradientFunction,
    max_kinds: int,
    launch: Callable[..., None] | None = None,
) -> None:
    """Give the host extension the Python functions that it calls, and the largest number of calls that it records.

    `launch`, if it is not None, replaces the launch function of the driver.
    """
    extension.configure(compute_gradients, _get_workspace, (Tensor, torch.nn.Parameter), max_kinds, launch)


def _get_workspace(index: int, stream: int, words: int, purpose: str) -> Tensor:
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    return get_or_allocate_stream_workspace(device, stream, words, purpose)


def describe_call(template: LaunchTemplate, outputs: Outputs, x: Tensor, any_rows: bool) -> tuple[Any, ...] | None:
    """Describe a recorded call as arguments of the extension's `record_replay`; None if it cannot repeat the call.

    Return None if a kernel needs features of Triton's launcher.  With `any_rows` the description is for any
    number of rows, else for the number in the call.

    Args:
        outputs: the call's outputs; the same `OutputSpec` twice if one tensor is two results.
        x: the call's x.
    """
    starts = [_describe_launch(start, template) for start in template.launches]
    if None in starts:
        return None
    return (
        any_rows,
        template.device_index,
        template.scratch_words,
        template.scratch_offsets,
        template.workspaces,
        template.program_rules,
        tuple(starts),
        tuple(_describe_output(outputs, place, x, any_rows) for place in range(len(outputs))),
    )


def _describe_output(outputs: Outputs, place: int, x: Tensor, any_rows: bool) -> tuple[Any, ...] | None:
    """Describe result number `place` of a call for the extension; None for a result that is absent.

    The description has five items: the number of an earlier result with the same tensor or -1, a code for
    the shape, the dtype, the shape and the strides.
    """
    output = outputs[place]
    if output is None:
        return None
    first = next(index for index, other in enumerate(outputs) if other is output)
    same = first if first < place else -1
    dtype = TORCH_DTYPES[output.dtype]
    if any_rows and output.shape is None and not output.has_x_layout:
        return same, (_AS_X, _AS_ROWS)[output.dropped_axes], dtype, (), ()
    return same, _FIXED, dtype, tuple(output.compute_shape(x)), _list_strides(output, x)


def _list_strides(output: OutputSpec, x: Tensor) -> tuple[int, ...]:
    """Return the strides of a result with x's layout; an empty tuple for those of a new tensor."""
    if not output.has_x_layout or tuple(x.stride()) == contiguous_strides(x.shape):
        return ()
    return tuple(torch.empty_like(x, device="meta").stride())


def _describe_launch(prepared_launch: PreparedLaunch, template: LaunchTemplate) -> tuple[Any, ...] | None:
    """Describe a launch as arguments of the driver; None if the kernel needs features of Triton's launcher."""
    compiled = prepared_launch.kernel.compiled_kernel
    metadata = getattr(compiled, "metadata", None)
    if metadata is None or metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    kinds = compiled.src.signature.values()
    parameters = tuple(_iterate_parameters(prepared_launch.slots, kinds, template))
    programs = -1 if prepared_launch.grid_slot is None else prepared_launch.grid_slot
    threads = 32 * metadata.num_warps
    flags = bool(metadata.launch_pdl), bool(metadata.launch_cooperative_grid)
    return compiled.function, prepared_launch.grid, programs, threads, metadata.shared, *flags, parameters


def _iterate_parameters(slots: tuple[int, ...], types: Any, template: LaunchTemplate) -> Iterator[Parameter]:
    """Yield a kernel's parameters in the form that the extension needs; each item of a tuple becomes a parameter.

    Each is a pair: whether the parameter is a constant, and its bits or its position in the list of a
    `LaunchTemplate`.
    """
    for place, kind in zip(slots, types, strict=True):
        if isinstance(kind, tuple):
            yield from _iterate_parameters(template.tuples[place], kind, template)
        elif kind != "constexpr":
            constant = place >= template.first_constant_slot
            yield (
                constant,
                _encode_constant(template.constants[place - template.first_constant_slot], kind)
                if constant
                else place,
            )


def _encode_constant(value: Any, kind: str) -> int:
    """Encode a constant as an integer whose lowest bytes are those of a parameter of type `kind`."""
    if kind == "fp32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & (2**64 - 1)
