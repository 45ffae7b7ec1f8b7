"""Conversion between float64 and the types of the API, such as bfloat16, which numpy lacks."""

from typing import Literal

import numpy as np
from normserve.client import DType, HostTensor
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def round_to_tensor(values: Floats, dtype: DType) -> HostTensor:
    """Round values to a tensor of an element type: each to the nearest representable one, ties to even."""
    if dtype is DType.BFLOAT16:
        bits = values.astype("<f4").view(np.uint32)
        elements: NDArray[np.generic] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    else:
        elements = values.astype(np.dtype(dtype.value).newbyteorder("<"))
    return HostTensor(dtype, values.shape, elements.reshape(-1).view(np.uint8).data)


def to_float64(tensor: HostTensor) -> Floats:
    """Convert a tensor to float64, exactly."""
    if tensor.dtype is DType.BFLOAT16:
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(tensor.shape, order=_get_memory_order(tensor))
    if tensor.dtype is DType.FLOAT8_E4M3FN:
        return _OF_FLOAT8[np.frombuffer(tensor.data, np.uint8)].reshape(tensor.shape)
    elements = np.frombuffer(tensor.data, np.dtype(tensor.dtype.value).newbyteorder("<"))
    return elements.astype(np.float64).reshape(tensor.shape, order=_get_memory_order(tensor))


def _compute_float8_values() -> Floats:
    """Compute the value of each of the 256 bytes that a float8_e4m3fn element can be.

    A byte has a sign, 4 bits of exponent and 3 of fraction; it is NaN if all of these 7 bits are set.
    """
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    normal, subnormal = (1 + fractions) * 2.0 ** (exponents - 7), fractions * 2.0**-6
    values = np.where(exponents > 0, normal, subnormal)
    values[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -values, values)


_OF_FLOAT8 = _compute_float8_values()


def _get_memory_order(tensor: HostTensor) -> Literal["C", "F"]:
    return "F" if tensor.fortran_order else "C"
