"""A tensor as the server passes it around: a description of memory with another owner.

It uses neither torch nor numpy: the codec creates these from a request body, and the executor returns them as
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
    """The value; as quick to read as any attribute, which `value` is not."""

    itemsize: int
    """Bytes of one element."""

    def __init__(self, name: str) -> None:
        self.label = name
        self.itemsize = {"float32": 4, "float8_e4m3fn": 1}.get(name, 2)


FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""What tensors of a request have; a result alone may have float8_e4m3fn, whose rows are nothing without a scale."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A contiguous, row-major, little-endian tensor in host memory.

    Attributes:
        dtype: element type.
        shape: sizes, outermost first; () is a scalar.
        data: flat view of `nbytes` bytes (format "B"); it keeps the memory that it shows alive.
        fortran_order: the bytes are in column-major order instead (an npy file may say so).
    """

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview
    fortran_order: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that shape and dtype ask for."""
        return prod(self.shape) * self.dtype.itemsize
