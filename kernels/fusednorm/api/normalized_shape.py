"""Conversion of torch's `normalized_shape` for the kernels, which normalise over one axis."""

import torch
from torch import Tensor

from fusednorm.errors import KernelInputError
from fusednorm.reference.checks import check_float


def rows_of(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """x [..., *normalized_shape] with those axes as one.

    Raises:
        KernelInputError: x has another shape, or normalized_shape has no axes.
    """
    axes = len(normalized_shape)
    if not axes or tuple(x.shape[-axes:]) != tuple(normalized_shape):
        raise KernelInputError(
            f"x must end in normalized_shape {list(normalized_shape)}, of at least one axis, got {list(x.shape)}"
        )
    return x.flatten(-axes)


def one_axis(name: str, parameter: Tensor | None, normalized_shape: tuple[int, ...]) -> Tensor | None:
    """A parameter [*normalized_shape] with those axes as one, or None.

    Raises:
        KernelInputError: it has another shape.
    """
    if parameter is None:
        return None
    if tuple(parameter.shape) != tuple(normalized_shape):
        raise KernelInputError(f"{name} must be {list(normalized_shape)}, got {list(parameter.shape)}")
    return parameter.flatten()


def machine_epsilon(x: Tensor) -> float:
    """The number that torch adds to the mean square if a module's eps is None.

    Raises:
        KernelInputError: x is not a float tensor.
    """
    check_float("x", x)
    # The epsilon of the dtype in which torch computes, which for float16 and bfloat16 is float32.
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
