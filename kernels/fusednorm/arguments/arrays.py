"""Descriptions of arrays of any library: the properties that checks and plans read."""

from dataclasses import dataclass
from math import prod

from fusednorm.devices.device_properties import GpuModel

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8}
"""Bytes of an element of each dtype; dtypes have the names that numpy, JAX and torch give them."""

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"


@dataclass(slots=True, eq=False)
class Workspace:
    """Memory that a call's launches need besides its inputs and results; immutable after construction.

    Attributes:
        dtype, count: the dtype and the number of its elements.
        purpose: None for memory with any content that is not needed after the plan.  Otherwise consecutive plans of
            a stream share the memory: it is zero at first, and each launch leaves it ready for the next.
    """

    dtype: str
    count: int
    purpose: str | None = None


@dataclass(slots=True, eq=False)
class Array:
    """The description of an array of any library, for checks and plans; immutable after construction.

    Its methods have the names and results of those of torch's tensors.  A frozen class would take twice as
    long to construct.

    Attributes:
        memory: the memory that has its elements: the name of an input or result, or a workspace.
        dtype: the name of its dtype.
        strides: in elements.
        device: the device that plans are made for.
        is_dense: whether its elements are contiguous.
        is_aligned: whether its first element has an address that is a multiple of 16.
        offset: elements of the memory before its first one.
    """

    memory: str | Workspace
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: GpuModel
    is_dense: bool = True
    is_aligned: bool = True
    offset: int = 0

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return ITEMSIZES[self.dtype]

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def stride(self, axis: int) -> int:
        """Return the stride of an axis, in elements."""
        return self.strides[axis]

    def is_contiguous(self) -> bool:
        """Return whether the array's elements are contiguous."""
        return self.is_dense

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> "Array":
        """Describe the same elements as an array with another shape and strides."""
        return Array(
            self.memory, self.dtype, shape, strides, self.device, self.is_dense, self.is_aligned, self.offset
        )

    def unbind(self) -> list["Array"]:
        """Describe each part along the first axis of a contiguous array, as torch.unbind does."""
        shape, strides, step, size = self.shape[1:], self.strides[1:], self.strides[0], self.element_size()
        parts = []
        for index in range(self.shape[0]):
            is_aligned = self.is_aligned and index * step * size % 16 == 0
            offset = self.offset + index * step
            parts.append(Array(self.memory, self.dtype, shape, strides, self.device, True, is_aligned, offset))
        return parts


def new_workspace(like: Array, *shape: int) -> Array:
    """Return a float32 workspace of a shape, for a plan for the device of `like`."""
    return Array(Workspace("float32", prod(shape)), "float32", shape, contiguous_strides(shape), like.device)


def workspace_like(array: Array, dtype: str) -> Array:
    """Return a workspace of a dtype with the shape, strides and device of an array without gaps."""
    memory = Workspace(dtype, array.numel())
    return Array(memory, dtype, array.shape, array.strides, array.device, array.is_dense)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous array of a shape."""
    if len(shape) < 3:
        return (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


def has_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether an array of this shape and strides is contiguous; axes of one element may have any stride."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def merge_axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the stride of the one axis into which adjacent axes can be merged; None if they cannot.

    They can be merged if the elements along them are one constant stride apart.  Axes of one element may
    have any stride.
    """
    if 0 in shape:
        return 1
    first, step = 1, None
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if step is None:
            first = stride
        elif stride != step:
            return None
        step = size * stride
    return first
