"""The options of calls: their names by operation, their keys, and what their checks refuse."""

import fusednorm
import pytest
import torch
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import OPTIONS_SCHEMA, NormOptions, collect_arguments, is_replayable

X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("layer_norm", {"weight", "bias", "scale", "shift", "gate", "weight_offset", "layout"}),
        ("rms_norm", {"weight", "scale", "shift", "gate", "weight_offset", "layout"}),
        ("group_norm", {"weight", "bias", "scale", "shift", "num_groups"}),
    ],
)
def test_an_operation_takes_its_own_arguments(op, names):
    common = {"x", "residual", "eps", "activation", "negative_slope", "dropout", "seed"}
    arguments = collect_arguments(op, NormInputs(X), NormOptions(op))
    assert arguments.keys() == names | common


def test_the_statistics_of_rms_norm_are_rstd_alone():
    inputs = BackwardInputs(X, *(None for _ in range(8)), X, None)
    assert collect_arguments("rms_norm", inputs).keys() & {"mean", "rstd"} == {"rstd"}


def test_plain_tuples_of_the_same_values_are_the_same_key():
    options = NormOptions("layer_norm", eps=1e-3, activation="silu")
    assert {options: 1}[("layer_norm", 0, 1e-3, 0.0, "silu", 0.0, None, 0.01, None)] == 1


@pytest.mark.parametrize(
    ("changed", "repeatable"), [({}, True), ({"dropout": 0.5, "seed": 1}, False), ({"seed": 1}, False)]
)
def test_calls_with_a_seed_are_not_repeatable(changed, repeatable):
    assert is_replayable(NormOptions("layer_norm", **changed)) is repeatable


def test_checked_options_have_the_types_of_kernels():
    options = NormOptions("layer_norm", eps=1, activation="leaky_relu", negative_slope=0).validate()
    assert type(options.eps) is type(options.negative_slope) is float


def test_operators_take_later_options_after_those_of_saved_graphs():
    assert OPTIONS_SCHEMA.endswith("SymInt seed, float negative_slope=0.01, str? layout=None")


@pytest.mark.parametrize(
    "changed",
    [
        {"eps": -1.0},
        {"activation": "tanh"},
        {"dropout": 1.0},
        {"dropout": 0.5},
        {"seed": 0.5},
        {"negative_slope": 0.2},
        {"activation": "relu", "negative_slope": 0.2},
        {"activation": "leaky_relu", "negative_slope": float("nan")},
        {"activation": "leaky_relu", "negative_slope": float("inf")},
        {"activation": "leaky_relu", "negative_slope": "0.2"},
        {"activation": "leaky_relu", "negative_slope": True},
    ],
)
def test_wrong_options_are_refused(changed):
    with pytest.raises(fusednorm.KernelInputError):
        NormOptions("layer_norm", **changed).validate()
