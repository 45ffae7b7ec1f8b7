"""Conversion of numpy arrays, torch tensors and arrays of other libraries to and from `HostTensor`.

A `HostTensor` is accepted in place of an array as well.  CUDA tensors are copied to host memory only for
transports that need their bytes there.  torch is imported only for results on a device: a caller that passes torch
tensors has imported it already.
"""

import ctypes
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeVar, cast

import numpy as np

from normserve.client.calls.foreign_arrays import make_foreign_array, view_foreign_array
from normserve.memory.tensors import FLOATS, DType, HostTensor

_FLOATS = {dtype.value: dtype for dtype in FLOATS}
_NOT_OF_NUMPY = {dtype.value: dtype for dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3FN)}

# The element types of most arrays; finding the name of a type takes numpy longer.
_LITTLE: dict[np.dtype[Any], DType] = {np.dtype("<f4"): DType.FLOAT32, np.dtype("<f2"): DType.FLOAT16}

_EMPTY = memoryview(b"")
_first_byte: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


class TensorLike(Protocol):
    """The type of array arguments, for type checkers: an array of any library, or a `HostTensor`.

    Anything with a shape and a dtype matches; `describe_array` checks the actual type.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, outermost first."""

    @property
    def dtype(self) -> Any:
        """The element type."""


T = TypeVar("T")


def describe_array(name: str, value: object) -> HostTensor:
    """Return a `HostTensor` for an array, without a copy if the array is contiguous, little-endian host memory.

    Other host arrays are copied now.  A CUDA tensor is copied to host memory only when a transport needs its
    bytes there.

    Args: name: the argument's name, for the error's message.

    Raises:
        TypeError: it is no array, or of no element type of the API.
    """
    if isinstance(value, HostTensor):
        return value
    if not (isinstance(value, np.ndarray) or _is_torch_tensor(value)):
        value = view_foreign_array(name, value)
    return _describe_numpy(name, value) if isinstance(value, np.ndarray) else _describe_torch(name, value)


def is_foreign_array(value: object) -> bool:
    """Return whether a value, if it is an array, is one of another library than numpy and torch."""
    return not (isinstance(value, np.ndarray | HostTensor) or _is_torch_tensor(value))


def convert_tensor(tensor: HostTensor, like: T) -> T:
    """Convert a tensor to an array of the same library and on the same device as `like`.

    Host memory stays where it is, unless its bytes are not aligned as torch requires.

    Raises:
        TypeError: that kind of array cannot hold the element type.
    """
    if isinstance(like, HostTensor):
        return cast(T, tensor)
    if _is_torch_tensor(like):
        return cast(T, _convert_to_torch(tensor, like))
    if isinstance(like, np.ndarray):
        return cast(T, _convert_to_numpy(tensor))
    there = tensor.view_tensor if isinstance(tensor, TorchCudaTensor) else _convert_to_numpy(tensor)
    return cast(T, make_foreign_array(there, like))


def parse_dtype(dtype: object) -> tuple[DType, bool]:
    """Parse a dtype, which is given as its name, as numpy's dtype or as torch's.

    Returns:
        the element type, and whether the dtype was torch's.

    Raises:
        TypeError: it is no element type of the API.
    """
    if isinstance(dtype, DType):
        return dtype, False
    return _find_dtype("dtype", name_dtype(dtype)), str(dtype).startswith("torch.")


def parse_shape(shape: object) -> tuple[int, ...]:
    """Return the sizes of a shape, which is a sequence of integers.

    Raises:
        TypeError: it is no such sequence.
        ValueError: a size is negative.
    """
    try:
        sizes = tuple(map(operator.index, cast(Sequence[SupportsIndex], shape)))
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, such as (8, 1024), got {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must have no negative size, got {list(sizes)}")
    return sizes


def name_dtype(dtype: object) -> str:
    """Return the name of a dtype that is given by name, as torch's, or as numpy's or its scalar type.

    What is no dtype is returned as text, for the error that says which names there are.
    """
    name = str(dtype)
    if isinstance(dtype, str) or name.startswith("torch."):
        return name.removeprefix("torch.")
    try:
        found: np.dtype[Any] = np.dtype(cast(Any, dtype))
    except TypeError:
        return name
    return found.name


def make_array(data: memoryview, dtype: DType, shape: tuple[int, ...], *, as_torch: bool) -> Any:
    """Make a numpy array or a torch tensor that uses the given memory, without a copy.

    Raises:
        TypeError: numpy has no such type, and `as_torch` is False.
    """
    tensor = HostTensor(dtype, shape, data)
    if not as_torch:
        return _convert_to_numpy(tensor)
    torch: Any = sys.modules["torch"]
    of_dtype = getattr(torch, dtype.value)
    if not len(data):
        return torch.empty(shape, dtype=of_dtype, device="cpu")
    return torch.frombuffer(data, dtype=of_dtype).reshape(shape)


def get_address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first byte."""
    try:
        # Takes a quarter of the time of `__array_interface__`.
        return ctypes.addressof(_first_byte(array))
    # The array is read-only, empty or not contiguous.
    except (TypeError, ValueError):
        where: int = array.__array_interface__["data"][0]
        return where


def get_cuda_index(device: object) -> int | None:
    """Return the index of a CUDA device; return None for a device of another type.

    A device without an index, "cuda", is torch's current device.
    """
    torch: Any = importlib.import_module("torch")
    named = torch.device(device)
    if named.type != "cuda":
        return None
    index: int = torch.cuda.current_device() if named.index is None else named.index
    return index


def make_device_tensor(device: object, dtype: DType, shape: tuple[int, ...]) -> Any:
    """Return a new uninitialised tensor in a device's memory, from torch's allocator."""
    torch: Any = importlib.import_module("torch")
    return torch.empty(shape, dtype=getattr(torch, dtype.value), device=device)


def check_dtype_support(like: object, dtype: str) -> None:
    """Raise TypeError if a result would be made by numpy and numpy lacks its dtype.

    It is called before a request is sent, whose result could not be converted.

    Raises:
        TypeError: `like` is neither torch's nor a `HostTensor`, and numpy has no such type.
    """
    if dtype in _NOT_OF_NUMPY and not (isinstance(like, HostTensor) or _is_torch_tensor(like)):
        get_numpy_dtype(_NOT_OF_NUMPY[dtype])


def _is_torch_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, of any class."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _find_dtype(name: str, dtype_name: str, conversion: str = "") -> DType:
    """Return the API's element type whose name is `dtype_name`.

    Args:
        name: the argument's name, for the error's message.
        conversion: code that converts the argument, for the error's message; "" for none.

    Raises:
        TypeError: the API has no such element type.
    """
    found = _FLOATS.get(dtype_name)
    if found is None:
        remedy = f"; {name}{conversion} converts it" if conversion else ""
        raise TypeError(f"{name} must be one of {', '.join(_FLOATS)}, got {dtype_name}{remedy}")
    return found


def _describe_numpy(name: str, array: np.ndarray[Any, Any]) -> HostTensor:
    """Describe a numpy array; copy its elements unless they are contiguous and little-endian."""
    dtype = _LITTLE.get(array.dtype)
    if dtype is not None and array.flags.c_contiguous:
        # An empty array cannot be cast.
        data = array.data.cast("B") if array.size else _EMPTY
        return HostTensor(dtype, array.shape, data)
    dtype = _find_dtype(name, array.dtype.name, ".astype(np.float32)")
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return HostTensor(dtype, array.shape, flat.view(np.uint8).data)


def _describe_torch(name: str, tensor: Any) -> HostTensor:
    """Describe a torch tensor; a CUDA tensor stays on its device, a contiguous CPU tensor is not copied."""
    dtype = _find_torch_dtype(name, tensor.dtype)
    torch: Any = sys.modules["torch"]
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "one on the device meta, which has no data" if tensor.is_meta else f"the layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense torch tensor, got {kind}")
    if tensor.is_cuda:
        return TorchCudaTensor(dtype, tensor.detach().resolve_neg())
    return HostTensor(dtype, tuple(tensor.shape), _get_host_bytes(tensor))


class TorchCudaTensor(HostTensor):
    """A torch tensor on a CUDA device as a `HostTensor`, copied to host memory only if `data` is read.

    Attributes:
        view_tensor: torch's, of any strides.
        data: the tensor's bytes in host memory, copied there at the first access.
    """

    __slots__ = ("_copy", "view_tensor")

    view_tensor: Any
    _copy: memoryview | None

    def __init__(self, dtype: DType, tensor: Any) -> None:
        for name, value in (("dtype", dtype), ("shape", tuple(tensor.shape)), ("fortran_order", False)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "view_tensor", tensor)
        object.__setattr__(self, "_copy", None)

    @property
    def data(self) -> memoryview:
        """The tensor's bytes in host memory, copied there at the first access."""
        copy = self._copy
        if copy is None:
            copy = _get_host_bytes(self.view_tensor)
            object.__setattr__(self, "_copy", copy)
        return copy


def _get_host_bytes(tensor: Any) -> memoryview:
    """Return a tensor's bytes in row-major order, copied unless the tensor is contiguous in host memory."""
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().resolve_neg().cpu().contiguous().reshape(-1)
    seen: memoryview = flat.view(torch.uint8).numpy().data
    return seen


_OF_TORCH: dict[object, DType] = {}


def _find_torch_dtype(name: str, dtype: object) -> DType:
    """Return the API's element type for a torch dtype, from a cache, since finding the dtype's name is slow.

    Raises:
        TypeError: the API has no such element type.
    """
    found = _OF_TORCH.get(dtype)
    if found is None:
        # Its name takes longer to find.
        found = _OF_TORCH[dtype] = _find_dtype(name, str(dtype).removeprefix("torch."), ".float()")
    return found


def _convert_to_numpy(tensor: HostTensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.data, get_numpy_dtype(tensor.dtype)).reshape(tensor.shape)


@functools.cache
def get_numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's dtype for little-endian elements of this type.

    Raises:
        TypeError: numpy has none.
    """
    try:
        little: np.dtype[Any] = np.dtype(dtype.value).newbyteorder("<")
    except TypeError:
        raise TypeError(
            f"numpy has no {dtype.value}: use torch tensors, another out_dtype, or import ml_dtypes"
        ) from None
    return little


def _convert_to_torch(tensor: HostTensor, like: Any) -> Any:
    """Convert a tensor to a torch tensor on the device of `like`, without a copy if it is there already.

    Host memory is copied, too, if it is not aligned to the element size.
    """
    if isinstance(tensor, TorchCudaTensor):
        there = tensor.view_tensor
        return there if there.device == like.device else there.to(like.device)
    torch: Any = sys.modules["torch"]
    dtype = getattr(torch, tensor.dtype.value)
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype, device=like.device)
    data = tensor.data
    if np.frombuffer(data, np.uint8).ctypes.data % tensor.dtype.itemsize:
        # After a header of odd length the data are unaligned, and torch requires aligned elements.
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape).to(like.device)
