"""Limits on the shapes of tensors in any payload."""

from collections.abc import Sequence
from math import prod

from normserve.errors import MalformedPayloadError

#: As many dimensions as numpy and torch can hold.
MAX_RANK = 64

_MAX_BYTES = 2**63 - 1


def count_bits_within_limits(shape: Sequence[int], element_bits: int) -> int:
    """Return the exact number of bits in a tensor of this shape, and refuse a shape beyond the limits.

    A zero among the sizes must not hide that the others overflow: strides are computed from them too.

    Raises:
        MalformedPayloadError: more than `MAX_RANK` dimensions, or more bytes than 63 bits can count.
    """
    if len(shape) > MAX_RANK:
        raise MalformedPayloadError(f"a shape must have at most {MAX_RANK} dimensions, got {len(shape)}")
    if prod(size for size in shape if size) * element_bits > _MAX_BYTES * 8:
        raise MalformedPayloadError("a shape must ask for fewer than 2^63 bytes")
    return prod(shape) * element_bits
