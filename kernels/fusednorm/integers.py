"""Integer division and powers of two on the host; Triton's own, which also work in kernels, take 2 us each."""

from math import gcd


def cdiv(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 1 for numbers below 1."""
    return 1 << max(0, number - 1).bit_length()


def compute_vector_width(most: int, *sizes: int) -> int:
    """Compute the largest power of two up to `most` that divides every size: elements of one vector access.

    `most` is a power of two.
    """
    return gcd(most, *sizes)
