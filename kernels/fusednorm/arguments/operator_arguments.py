"""The order of tensors and options in the schemas of operators, to which saved graphs refer.

A tensor that operators gained later follows the options and has the default None: older graphs remain valid.
"""

from typing import Any, TypeVar

from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import OPTIONS_SCHEMA, NormOptions

Inputs = TypeVar("Inputs", NormInputs, BackwardInputs)

_TENSORS: dict[type, tuple[str, ...]] = {
    NormInputs: ("x", "weight", "bias", "residual", "scale", "shift"),
    BackwardInputs: (
        "dy", "x", "weight", "bias", "mean", "rstd", "residual", "scale", "shift", "dresidual_out",
    ),
}  # fmt: skip
_LATER_TENSORS = ("gate",)
_OPTIONS = len(NormOptions._fields) - 1
"""The number of options in a schema, which does not have `op`."""


def format_argument_schema(inputs: type[NormInputs | BackwardInputs], *required: str) -> str:
    """Format the arguments of an operator for its schema; tensors that are not required may be None."""
    first = (f"{'Tensor' if name in required else 'Tensor?'} {name}" for name in _TENSORS[inputs])
    return ", ".join((*first, OPTIONS_SCHEMA, *(f"Tensor? {name}=None" for name in _LATER_TENSORS)))


def list_operator_arguments(
    inputs: NormInputs[Any] | BackwardInputs[Any], options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """List the arguments of an operator; `options` are `NormOptions.operator_arguments`, or a value for each."""
    names = _TENSORS[type(inputs)]
    return (
        *(getattr(inputs, name) for name in names),
        *options,
        *(getattr(inputs, name) for name in _LATER_TENSORS),
    )


def parse_operator_arguments(kind: type[Inputs], op: str, arguments: tuple[Any, ...]) -> tuple[Inputs, NormOptions]:
    """Parse the arguments of an operator; the dispatcher omits the last ones that have their defaults."""
    names = _TENSORS[kind]
    options, later = arguments[len(names) :][:_OPTIONS], arguments[len(names) + _OPTIONS :]
    tensors = dict(zip(names, arguments, strict=False)) | dict(zip(_LATER_TENSORS, later, strict=False))
    return kind._make(map(tensors.get, kind._fields)), NormOptions(op, *options)
