"""The fewest bytes an operation must move through device memory, for metrics and benchmarks alike.

A forward pass reads x and writes y; a backward pass reads dy and x and writes dx.  A residual costs one more read,
its sum one more write, the gradient of that sum (dresidual_out) one more read, and, if the residual's dtype is not
x's or x has a gate, its gradient one more write.  Parameters, those of samples too, statistics and their gradients
do not count, nor do the scales of the rows of a float8 y, whose elements have one byte each.  A chain of norms is
one forward pass.  Everywhere in this project bandwidth is these bytes divided by device time, independent of the
bytes that a kernel really moves.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING


def compute_forward_bytes(numel: int, x: int, y: int, *, residual: int = 0, residual_out: int = 0) -> int:
    """Compute the fewest bytes that a forward pass must read and write in device memory.

    Args:
        numel: elements of x.
        x: bytes of one element of x; likewise y, residual and residual_out, 0 if the tensor is absent.
    """
    return numel * (x + y + residual + residual_out)


def compute_backward_bytes(
    numel: int,
    x: int,
    dy: int,
    *,
    dx: int | None = None,
    residual: int = 0,
    dresidual_out: int = 0,
    dresidual: int = 0,
) -> int:
    """Compute the fewest bytes that a backward pass must read and write in device memory.

    Args:
        numel: elements of x.
        x: bytes of one element of x; likewise dy, dx (x's when None), residual, dresidual_out and dresidual, 0 if
            the tensor is absent or dresidual is dx.
    """
    return numel * (x + dy + (x if dx is None else dx) + residual + dresidual_out + dresidual)


if not TYPE_CHECKING:
    # Type checkers see the new names alone.
    def __getattr__(name: str) -> Callable[..., int]:
        """Return `compute_forward_bytes` or `compute_backward_bytes` by its old name, with a DeprecationWarning."""
        if name not in ("forward_bytes", "backward_bytes"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        message = f"fusednorm.traffic.{name} is called compute_{name}, and the old name will be removed in 0.3.0"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return globals()[f"compute_{name}"]
