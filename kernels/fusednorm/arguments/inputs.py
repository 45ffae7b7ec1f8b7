"""The tensors of a call, in one order for passes, keys of calls and gradients, and the role of each."""

from collections.abc import Sequence
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
    "mean": ShapeRole.PER_ROW,
    "rstd": ShapeRole.PER_ROW,
    "dy": ShapeRole.LIKE_X,
    "dresidual_out": ShapeRole.LIKE_X,
}

OPERATIONS = ("layer_norm", "rms_norm", "group_norm")

_CENTRED = ("layer_norm", "group_norm")

OPERATIONS_WITH = {"bias": _CENTRED, "mean": _CENTRED}
"""The operations that have each tensor; a tensor that is not listed belongs to all operations."""

_OPERATOR_ORDER = "dy", "x", "weight", "bias", "mean", "rstd", "residual", "scale", "shift", "dresidual_out"
"""The tensors of backward operators, whose schemas saved graphs refer to; forward operators have `NormInputs`."""


class NormInputs(NamedTuple, Generic[A]):
    """The tensors of a forward pass; absent ones are None.

    `results.Backward` has their gradients in the same order.

    Attributes:
        x: the tensor that is normalised.
        weight, bias: the affine step of columns, heads or channels.
        residual: added to x first.
        scale, shift: the affine step of each sample.
    """

    x: A
    weight: A | None = None
    bias: A | None = None
    residual: A | None = None
    scale: A | None = None
    shift: A | None = None


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
    mean: A | None
    rstd: A | None
    dy: A
    dresidual_out: A | None

    @property
    def forward_inputs(self) -> NormInputs[A]:
        """The tensors of the forward pass."""
        return NormInputs._make(self[: len(NormInputs._fields)])

    @classmethod
    def from_operator_arguments(cls, tensors: Sequence[Any]) -> "BackwardInputs[A]":
        """Make the inputs from the tensors of a backward operator."""
        return cls(**dict(zip(_OPERATOR_ORDER, tensors, strict=True)))

    def list_operator_arguments(self) -> tuple[A | None, ...]:
        """List the inputs as arguments of a backward operator."""
        return tuple(getattr(self, name) for name in _OPERATOR_ORDER)


@cache
def group_names_by_role(fields: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Group the field names of inputs by role, in the order of `ShapeRole`."""
    return tuple(tuple(name for name in fields if ROLES[name] is role) for role in ShapeRole)


def list_roles(inputs: type[NormInputs | BackwardInputs]) -> tuple[ShapeRole, ...]:
    """List the role of each input."""
    return tuple(ROLES[name] for name in inputs._fields)


def format_tensor_schema(inputs: type[NormInputs | BackwardInputs], *required: str) -> str:
    """Format the inputs for the schema of an operator; those that are not required may be None."""
    names = _OPERATOR_ORDER if inputs is BackwardInputs else inputs._fields
    return ", ".join(f"{'Tensor' if name in required else 'Tensor?'} {name}" for name in names)
