"""Arrays of other libraries than numpy and torch: views of their memory, and results as arrays of the same library.

Each is exchanged by DLPack, or by the CUDA array interface.  A library is found through its array, and is never
imported here: a caller that passes its array has imported it already.
"""

import sys
from contextlib import suppress
from typing import Any

import numpy as np

# How libraries refuse to export or to import an array: a dtype, a device or a flag that they do not have there.
_REFUSALS = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)

# DLPack's numbers of device types: CUDA's memory, and its managed memory.
_CUDA_TYPES = (2, 13)

# Of memory that libraries use without a copy, in bytes.
_ALIGNMENT = 64

EXPORTED_DEVICES: set[int] = set()
"""Indices of CUDA devices with a result that is an array of another library, whose streams torch does not know."""


def view_foreign_array(name: str, value: object) -> Any:
    """Return a numpy array over the memory of another library's array; over that of a GPU a torch tensor.

    An array on a GPU is copied to the host if torch with CUDA is not imported, and so is one that is divided among
    devices.

    Args: name: the argument's name, for the error's message.

    Raises:
        TypeError: the value is no array, or numpy cannot read it.
    """
    if not (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
        raise TypeError(_explain_refusal(name, value))
    is_on_cuda = _is_on_cuda(value)
    torch: Any = sys.modules.get("torch")
    if is_on_cuda and torch is not None and torch.backends.cuda.is_built():
        return _view_by_torch(torch, value)
    try:
        return np.from_dlpack(value, device="cpu") if is_on_cuda else np.from_dlpack(value)  # type: ignore[arg-type]
    except _REFUSALS:
        # numpy has neither bfloat16 nor float8 by DLPack; an array of several devices has no DLPack.
        array = _convert_by_numpy(value)
    if array is None:
        kind, dtype = type(value).__name__, getattr(value, "dtype", None)
        remedy = "" if dtype is None else f" of {dtype}; convert it to float32 or float16"
        raise TypeError(f"{name} must be an array that numpy can read, got {kind}{remedy}")
    return array


def _convert_by_numpy(value: object) -> np.ndarray[Any, Any] | None:
    """Convert an array to numpy's, without a copy where possible; return None if numpy refuses it."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return None if array.dtype == object else array


def make_foreign_array(result: Any, like: object) -> Any:
    """Return a numpy array or a torch tensor as an array of the library of `like`, on its device.

    Without a copy where the library can use the memory.  For a library without `from_dlpack` it stays as it is.

    Args: result: a numpy array, or torch's tensor on a GPU.
    """
    library = _find_library(like)
    from_dlpack = getattr(library, "from_dlpack", None)
    if from_dlpack is None:
        return result
    if hasattr(result, "is_cuda"):
        EXPORTED_DEVICES.add(result.get_device())
        try:
            return from_dlpack(result)
        except _REFUSALS:
            # Older versions of torch do not export float8.
            result = _copy_to_host(result)
    made = _import_host_array(library, result)
    return made if made is result else _move_to_device_of(like, made)


def _copy_to_host(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a torch tensor as a numpy array of the same dtype."""
    torch: Any = sys.modules["torch"]
    data: np.ndarray[Any, Any] = tensor.contiguous().view(torch.uint8).cpu().numpy()
    return data.view(str(tensor.dtype).removeprefix("torch."))


def _import_host_array(library: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return a numpy array as an array of a library that has `from_dlpack`; unchanged if the library refuses it."""
    asarray = getattr(library, "asarray", None)
    # Libraries copy other memory, some with a warning and all more slowly than by their `asarray`.
    if asarray is None or array.ctypes.data % _ALIGNMENT == 0:
        # Refused are dtypes that numpy does not export, and by some libraries all memory of the host.
        with suppress(*_REFUSALS):
            return library.from_dlpack(array)
    return array if asarray is None else asarray(array)


def _move_to_device_of(like: Any, array: Any) -> Any:
    """Return an array on the device of another of its library; unchanged if that has none, or several."""
    device = getattr(like, "device", None)
    if device is None or device == getattr(array, "device", None) or _find_device(like) is None:
        return array
    return array.to_device(device) if hasattr(array, "to_device") else array


def _explain_refusal(name: str, value: object) -> str:
    """Return the text of the error for an argument that is no array, with what to write instead."""
    kind, remedy = type(value).__name__, ""
    if isinstance(value, int | float | list | tuple) or hasattr(value, "__array__"):
        # The items of a list are named x.0, x.1 and so on.
        name, dot, _ = name.partition(".")
        kind = f"a list of {kind}" if dot else kind
        remedy = f'; np.asarray({name}, dtype="float32") makes one'
    expected = "a numpy array, a torch tensor, or an array with __dlpack__ or __cuda_array_interface__"
    return f"{name} must be {expected}, got {kind}{remedy}"


def _is_on_cuda(value: object) -> bool:
    device = _find_device(value)
    if device is None:
        return not hasattr(value, "__dlpack__")
    return device[0] in _CUDA_TYPES


def _find_device(value: Any) -> tuple[int, int] | None:
    """Return DLPack's type and number of the device of an array; None if it is not on one device."""
    try:
        kind, number = value.__dlpack_device__()
    except _REFUSALS:
        return None
    return int(kind), int(number)


def _view_by_torch(torch: Any, value: Any) -> Any:
    """Return a torch tensor over the memory of an array on a GPU, whose contents the current stream may read."""
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    view = torch.as_tensor(value, device="cuda")
    # The stream that writes the array is not known.
    torch.cuda.synchronize(view.device)
    return view


def _find_library(array: Any) -> Any:
    """Return the module with the functions of an array's library; None if there is none."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(type(array).__module__.partition(".")[0])
