"""The options of a call: everything but its tensors, and which results are wanted."""

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from fusednorm.arguments.checks import (
    DEFAULT_SLOPE,
    check_dropout,
    check_layout,
    validate_activation,
    validate_eps,
    validate_negative_slope,
)
from fusednorm.arguments.dropout import compute_dropout_threshold
from fusednorm.arguments.inputs import OPERATIONS, OPERATIONS_WITH, ROW_OPERATIONS, BackwardInputs, NormInputs
from fusednorm.results import A

_OF_ROWS = dict.fromkeys(("weight_offset", "layout"), ROW_OPERATIONS)
_OPERATIONS_WITH = {"num_groups": ("group_norm",), **_OF_ROWS, **OPERATIONS_WITH}
"""The operations that have each option or tensor; a name that is not listed belongs to all operations."""

OptionValues = tuple[str, int, float, float, str | None, float, int | None, float, str | None]
"""The values of `NormOptions` in their order, equal to it as a key.

A replayed call needs no more; a named tuple would cost the host 0.5 us.
"""


def is_replayable(values: OptionValues) -> bool:
    """Return whether calls with these options may be replayed: a seed differs between calls."""
    _, _, _, _, _, dropout, seed, _, _ = values
    return not (dropout or seed)


class NormOptions(NamedTuple):
    """The options of a call of an operation: all of its arguments that are not tensors.

    The caller of an operation passes any values; a pass reads the result of `validate`.

    Attributes:
        op: one of `inputs.OPERATIONS`.
        num_groups: the number of groups; 0 for operations without groups.
        eps: added to the variance.
        weight_offset: added to the weight; 0 or 1.
        activation: the name of the function that follows the affine step.
        dropout: the probability of a zero.
        seed: the seed of dropout's mask.
        negative_slope: the factor of negative values in leaky_relu.
        layout: None for rows along the last axis, "nchw" for norms over axis 1.
    """

    op: str
    num_groups: int = 0
    eps: float = 1e-5
    weight_offset: float = 0.0
    activation: str = "none"
    dropout: float = 0.0
    seed: int | None = None
    negative_slope: float = DEFAULT_SLOPE
    layout: str | None = None

    @property
    def is_rms(self) -> bool:
        """Whether the mean is not subtracted."""
        return self.op == "rms_norm"

    @property
    def epilogue_arguments(self) -> tuple[int, int, float, float]:
        """The last arguments of kernels with an epilogue: seed, threshold and scale of dropout, negative slope."""
        threshold, scale = compute_dropout_threshold(self.dropout), 1.0 / (1.0 - self.dropout)
        return self.seed or 0, threshold, scale, self.negative_slope

    @property
    def constexprs(self) -> dict[str, object]:
        """The constexprs of kernels for the steps that follow the affine one: see `fusednorm.jit.epilogue`."""
        return {"ACTIVATION": self.activation, "DROPOUT": self.dropout > 0.0}

    @property
    def operator_arguments(self) -> tuple[Any, ...]:
        """The options as arguments of an operator."""
        return self._replace(seed=self.seed or 0)[1:]

    @property
    def statistics_options(self) -> "NormOptions":
        """The options of a pass that computes only mean and rstd."""
        return NormOptions(self.op, self.num_groups, self.eps)

    def validate(self) -> "NormOptions":
        """Check the options and return them with eps and negative_slope as floats, and no activation as "none".

        Options that depend on a tensor, such as num_groups, are checked together with the tensor.

        Raises:
            KernelInputError: an option has a wrong type or value.
        """
        activation = validate_activation(self.activation)
        check_dropout(self.dropout, self.seed)
        check_layout(self.layout)
        eps, slope = validate_eps(self.eps), validate_negative_slope(self.negative_slope, activation)
        if eps is self.eps and slope is self.negative_slope and activation is self.activation:
            return self
        return self._replace(eps=eps, negative_slope=slope, activation=activation)


# A seed, which differs between calls, is an input of a compiled graph.
_SCHEMA_TYPES = {int: "int", float: "float", str: "str", int | None: "SymInt", str | None: "str?"}
_TYPES = NormOptions.__annotations__.items()

_SCHEMA_DEFAULTS = {"negative_slope": f"={DEFAULT_SLOPE}", "layout": "=None"}
"""The defaults of options that operators have had since a later version: saved graphs call them without."""

OPTIONS_SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[kind]} {name}{_SCHEMA_DEFAULTS.get(name, '')}" for name, kind in _TYPES if name != "op"
)
"""The options in the schemas of operators."""


@cache
def _select_fields(op: str, fields: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Select the fields that an operation has, and the function that gets their values."""
    names = tuple(name for name in fields if name != "op" and op in _OPERATIONS_WITH.get(name, OPERATIONS))
    return names, itemgetter(*map(fields.index, names))


def collect_arguments(
    op: str, inputs: NormInputs[A] | BackwardInputs[A], options: NormOptions | None = None
) -> dict[str, Any]:
    """Collect the inputs and options that `op` has, as keyword arguments of its pass."""
    fields, given = (
        (inputs._fields, inputs) if options is None else (inputs._fields + options._fields, inputs + options)
    )
    names, values = _select_fields(op, fields)
    return dict(zip(names, values(given), strict=True))
