"""The order of an operator's arguments, and arguments that are omitted."""

import pytest
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.operator_arguments import (
    format_argument_schema,
    list_operator_arguments,
    parse_operator_arguments,
)
from fusednorm.arguments.options import NormOptions

OPTIONS = NormOptions("layer_norm", 0, 1e-3, 1.0, "silu", 0.5, 7)


@pytest.mark.parametrize("kind", [NormInputs, BackwardInputs])
def test_arguments_are_put_in_order_and_back(kind):
    inputs = kind(*range(len(kind._fields)))
    arguments = list_operator_arguments(inputs, OPTIONS.operator_arguments)
    assert parse_operator_arguments(kind, OPTIONS.op, arguments) == (inputs, OPTIONS)


@pytest.mark.parametrize("kind", [NormInputs, BackwardInputs])
def test_arguments_have_the_order_of_the_schema(kind):
    inputs = kind(*kind._fields)
    options = OPTIONS._fields[1:]
    schema = format_argument_schema(kind, "x").split(", ")
    names = [argument.split()[1].partition("=")[0] for argument in schema]
    assert names == list(list_operator_arguments(inputs, options))
    assert [argument for argument in schema if argument.startswith("Tensor ")] == ["Tensor x"]


@pytest.mark.parametrize("kind", [NormInputs, BackwardInputs])
def test_a_tensor_that_operators_gained_later_may_be_omitted(kind):
    inputs = kind(*range(len(kind._fields)))._replace(gate=None)
    arguments = list_operator_arguments(inputs, OPTIONS.operator_arguments)
    assert arguments[-1] is None
    assert parse_operator_arguments(kind, OPTIONS.op, arguments[:-1]) == (inputs, OPTIONS)
