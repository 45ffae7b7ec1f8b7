"""The tensors of a call, in one order for passes, keys of calls and gradients, and the role of each."""

from enum import IntEnum
from functools import cache
from typing import Any, Generic, NamedTuple

from fusednorm.results import A


class ShapeRole(IntEnum):
    """The role of a tensor in a call, which determines its shape for a given x."""

    LIKE_X = 0
    """x's shape."""

    PER_ROW = 1
    """x's shape without the last axis, or [N, num_groups]."""

    PARAMETER = 2
    """The shape does not depend on the number of rows or samples."""

    PER_SAMPLE = 3
    """[N, C] of x [N, C, *spatial], or x.shape[:k] and the last axis, with axes of one element between or not."""


ROLES = {
    "x": ShapeRole.LIKE_X,
    "weight": ShapeRole.PARAMETER,
    "bias": ShapeRole.PARAMETER,
    "residual": ShapeRole.LIKE_X,
    "scale": ShapeRole.PER_SAMPLE,
    "shift": ShapeRole.PER_SAMPLE,
    "gate": ShapeRole.PER_SAMPLE,
    "mean": ShapeRole.PER_ROW,
    "rstd": ShapeRole.PER_ROW,
    "dy": ShapeRole.LIKE_X,
    "dresidual_out": ShapeRole.LIKE_X,
}

OPERATIONS = ("layer_norm", "rms_norm", "group_norm")

_CENTRED = ("layer_norm", "group_norm")

ROW_OPERATIONS = ("layer_norm", "rms_norm")

OPERATIONS_WITH = {"bias": _CENTRED, "mean": _CENTRED, "gate": ROW_OPERATIONS}
"""The operations that have each tensor; a tensor that is not listed belongs to all operations."""


class NormInputs(NamedTuple, Generic[A]):
    """The tensors of a forward pass; absent ones are None.

    `results.Backward` has their gradients in the same order.

    Attributes:
        x: the tensor that is normalised.
        weight, bias: the affine step of columns, heads or channels.
        residual: added to x first.
        scale, shift: the affine step of each sample.
        gate: the factor of x in each sample, before the residual is added.
    """

    x: A
    weight: A | None = None
    bias: A | None = None
    residual: A | None = None
    scale: A | None = None
    shift: A | None = None
    gate: A | None = None


class BackwardInputs(NamedTuple, Generic[A]):
    """The tensors of a backward pass: those of the forward pass, its statistics, and gradients of its results.

    Attributes:
        mean, rstd: the saved statistics.
        dy, dresidual_out: the gradients of y and residual_out.
    """

    x: A
    weight: A | None
    bias: A | None
    residual: A | None
    scale: A | None
    shift: A | None
    gate: A | None
    mean: A | None
    rstd: A | None
    dy: A
    dresidual_out: A | None

    @property
    def forward_inputs(self) -> NormInputs[A]:
        """The tensors of the forward pass."""
        return NormInputs._make(self[: len(NormInputs._fields)])


def has_own_gradient(op: str, inputs: NormInputs[Any] | BackwardInputs[Any]) -> bool:
    """Return whether the residual's gradient is a separate tensor, not dx."""
    if inputs.residual is None or op == "group_norm":
        return False
    return inputs.gate is not None or inputs.residual.dtype != inputs.x.dtype


@cache
def group_names_by_role(fields: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Group the field names of inputs by role, in the order of `ShapeRole`."""
    return tuple(tuple(name for name in fields if ROLES[name] is role) for role in ShapeRole)


def list_roles(inputs: type[NormInputs | BackwardInputs]) -> tuple[ShapeRole, ...]:
    """List the role of each input."""
    return tuple(ROLES[name] for name in inputs._fields)
