"""Tensors as JSON arrays of numbers, nested by their shape or flat in row-major order.

Numbers are parsed and written one by one, which blocks the event loop, so their number is limited.
"""

import functools
from collections.abc import Sequence
from math import prod
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from normserve.codec.shapes import count_bits_within_limits
from normserve.errors import MalformedPayloadError, NotAcceptableError, TooLargeError
from normserve.memory.tensors import DType, HostTensor

MAX_ELEMENTS = 2**18
"""The most elements of one tensor."""

_FLAT = msgspec.json.Decoder(list[float])
_STORED: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),
}


def decode(name: str, dtype: DType, shape: Sequence[int], data: bytes | memoryview) -> HostTensor:
    """Decode a JSON array, nested by the shape or flat, to a tensor with its own buffer.

    Args: name: the tensor's name in messages.

    Raises:
        MalformedPayloadError: the array has another shape, holds something else than numbers, or one
            that the element type cannot hold.
        TooLargeError: it has more than `MAX_ELEMENTS`, or more nested arrays.
    """
    count_bits_within_limits(shape, dtype.itemsize * 8)
    count = prod(shape)
    if count > MAX_ELEMENTS:
        raise TooLargeError(
            f"{name} must have at most {MAX_ELEMENTS} elements as JSON, has {count}; send binary data"
        )
    values = _decode_values(name, shape, data)
    if values.shape not in ((count,), tuple(shape)):
        raise _make_shape_error(name, shape)
    with np.errstate(over="ignore"):
        stored = _round_to_bfloat16(values) if dtype is DType.BFLOAT16 else values.astype(_STORED[dtype])
        is_held = np.isfinite(_widen(stored, dtype)).all()
    if not is_held:
        raise MalformedPayloadError(f"{name} holds a number beyond {dtype.value}")
    return HostTensor(dtype, tuple(shape), memoryview(bytearray(stored.tobytes())))


def encode(name: str, tensor: HostTensor) -> list[float]:
    """Return a tensor's elements in row-major order, as numbers whose JSON text restores them exactly.

    Raises:
        TooLargeError: there are more than `MAX_ELEMENTS`.
        NotAcceptableError: one is NaN or infinite, for which JSON has no number.
    """
    require_json_size(name, prod(tensor.shape))
    values = _widen(np.frombuffer(tensor.data, _STORED[tensor.dtype]), tensor.dtype)
    if not np.isfinite(values).all():
        raise NotAcceptableError(f"{name} holds NaN or infinity, which JSON cannot represent: request binary data")
    numbers: list[float] = values.tolist()
    return numbers


def require_json_size(name: str, count: int) -> None:
    """Raise TooLargeError if a tensor has too many elements for JSON."""
    if count > MAX_ELEMENTS:
        raise TooLargeError(
            f"{name} has {count} elements, at most {MAX_ELEMENTS} are sent as JSON: request binary data"
        )


def _decode_values(name: str, shape: Sequence[int], data: bytes | memoryview) -> npt.NDArray[np.float64]:
    """Parse a JSON array of numbers, flat or nested by the shape.

    Brackets and commas are counted first, so that no more numbers are decoded than the shape has.

    Raises:
        MalformedPayloadError: the array has another shape, or holds something else than numbers.
        TooLargeError: there are too many nested arrays.
    """
    # Before anything is decoded, so that no more is than the shape declares.
    text = np.frombuffer(data, np.uint8)
    arrays, commas = (int(np.count_nonzero(text == ord(each))) for each in "[,")
    if arrays > MAX_ELEMENTS + 1:
        raise TooLargeError(f"{name} must have at most {MAX_ELEMENTS} nested arrays, has {arrays}; send it flat")
    if arrays not in (1, _count_arrays(shape)) or commas >= max(arrays, prod(shape)):
        raise _make_shape_error(name, shape)
    try:
        return np.array(_FLAT.decode(data), np.float64)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return np.array(_make_nested_decoder(len(shape)).decode(data), np.float64)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _make_shape_error(name, shape) from None


def _count_arrays(shape: Sequence[int]) -> int:
    """Return the number of JSON arrays in a tensor that is nested by its shape."""
    return 1 + sum([prod(shape[:rank]) for rank in range(1, len(shape))])


def _make_shape_error(name: str, shape: Sequence[int]) -> MalformedPayloadError:
    """Make the error for a JSON array that does not have the tensor's shape."""
    count = prod(shape)
    return MalformedPayloadError(
        f"{name} must be an array of {count} numbers, flat or nested by shape {list(shape)}"
    )


@functools.cache
def _make_nested_decoder(rank: int) -> msgspec.json.Decoder[list[object]]:
    """Make a decoder of numbers in arrays that are nested `rank` deep.

    The decoders are kept: `count_bits_within_limits` limits the rank, and so their number.
    """
    kind: GenericAlias | type = float
    for _ in range(max(1, rank)):
        kind = GenericAlias(list, (kind,))
    return msgspec.json.Decoder(kind)


def _round_to_bfloat16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, to the nearest with ties to even; return the bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _widen(stored: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype is DType.BFLOAT16 else stored
