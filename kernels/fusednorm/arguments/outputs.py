"""The results of a pass: each pass declares them once, as an `OutputSpec` for each field.

This declaration describes the results that a plan writes, and allocates and checks the tensors of the first call of
a kind and, in `launch.replay_cache`, of the following calls.
"""

from typing import Any, NamedTuple

from fusednorm.arguments.arrays import Array, contiguous_strides


class OutputSpec(NamedTuple):
    """The dtype and shape of one result of a pass, relative to x; the result is on the device of x.

    Attributes:
        name: the field of the result.
        dtype: the name of the dtype.
        shape: the shape; None for x's shape without its last `dropped_axes` axes.
        has_x_layout: whether the result has x's layout, one of the two layouts of samples; else it is contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None = None
    dropped_axes: int = 0
    has_x_layout: bool = False

    def compute_shape(self, x: Any) -> tuple[int, ...]:
        """Compute the result's shape for a call with x, an array of any library."""
        if self.shape is not None:
            return self.shape
        shape: tuple[int, ...] = x.shape
        return shape[: len(shape) - self.dropped_axes] if self.dropped_axes else shape

    def describe(self, x: Array, is_aligned: bool = True) -> Array:
        """Return the `Array` that describes this result, for a call with x."""
        if self.has_x_layout:
            return Array(self.name, self.dtype, x.shape, x.strides, x.device, x.is_dense, is_aligned)
        shape = self.compute_shape(x)
        strides = x.strides if shape is x.shape and x.is_dense else contiguous_strides(shape)
        return Array(self.name, self.dtype, shape, strides, x.device, True, is_aligned)


Outputs = tuple[OutputSpec | None, ...]
"""One `OutputSpec` per field of a result, or None for no array; fields with one `OutputSpec` share an array."""
