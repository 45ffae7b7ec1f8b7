"""Descriptions of tensors in host or device memory that has another owner.

They use neither torch nor numpy: the codec creates them from a request body, and the executor returns them as
results.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod


class DType(Enum):
    """Element types of the API; the value is the name used in parameters, metrics and torch."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"

    # Members are their own only equals; Enum's own hash is that of the name, computed in Python each time.
    __hash__ = object.__hash__

    label: str
    """The value; as fast to read as any attribute, in contrast to `value`."""

    itemsize: int
    """Bytes of one element."""

    def __init__(self, name: str) -> None:
        self.label = name
        self.itemsize = {"float32": 4, "float8_e4m3fn": 1}.get(name, 2)


FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""Element types of a request's tensors; only a result may be float8_e4m3fn, which needs a scale for each row."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A contiguous, little-endian tensor in host memory, row-major unless `fortran_order` is set.

    Attributes:
        dtype: element type.
        shape: sizes, outermost first; () is a scalar.
        data: flat view of `nbytes` bytes (format "B"); it keeps the memory alive.
        fortran_order: whether the bytes are in column-major order, as in some npy files.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview
    fortran_order: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that the shape and dtype require."""
        return prod(self.shape) * self.dtype.itemsize


class DeviceTensor(HostTensor):
    """A contiguous, row-major tensor in the memory of a device.

    All attributes are as in `HostTensor` except `data`, a `DeviceMemoryView`: it has a size and keeps the memory,
    and code that uses it as host memory gets a TypeError.
    """

    __slots__ = ()
