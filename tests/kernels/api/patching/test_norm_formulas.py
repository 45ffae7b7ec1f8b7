"""The formulas of norms: what they compute, how they are called in a report, and for which shapes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.api.patching.activation_modules import NO_ACTIVATION, ActivationOptions
from fusednorm.api.patching.norm_formulas import NormFormula, iterate_row_formulas

X, WEIGHT, BIAS = torch.randn(2, 4, 8), torch.randn(8), torch.randn(8)


def rms_norm(weight=None):
    return F.rms_norm(X, (8,), weight, 1e-6)


COMPUTED = {
    "rms_norm": (NormFormula("rms_norm", "weight", None), lambda: rms_norm(WEIGHT)),
    "rms_norm, no weight": (NormFormula("rms_norm", None, None), rms_norm),
    "rms_norm, weight_offset=1": (NormFormula("rms_norm", "weight", None, 1.0), lambda: rms_norm(WEIGHT + 1)),
    "rms_norm, bias": (NormFormula("rms_norm", "weight", "bias"), lambda: rms_norm(WEIGHT) + BIAS),
    "rms_norm, layout=nchw, bias": (
        NormFormula("rms_norm", None, "bias", layout="nchw"),
        lambda: F.rms_norm(X.mT, (4,), eps=1e-6).mT + BIAS[:4, None],
    ),
    "layer_norm": (NormFormula("layer_norm", None, None), lambda: F.layer_norm(X, (8,), eps=1e-6)),
    "layer_norm, layout=nchw": (
        NormFormula("layer_norm", None, None, layout="nchw"),
        lambda: F.layer_norm(X.mT, (4,), eps=1e-6).mT,
    ),
    "layer_norm with silu": (
        NormFormula("layer_norm", "weight", "bias", activation=ActivationOptions("silu")),
        lambda: F.silu(F.layer_norm(X, (8,), WEIGHT, BIAS, 1e-6)),
    ),
    "group_norm with gelu_tanh": (
        NormFormula("group_norm", None, None, activation=ActivationOptions("gelu_tanh"), num_groups=2),
        lambda: F.gelu(F.group_norm(X, 2, eps=1e-6), approximate="tanh"),
    ),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_formula_computes_what_it_is_called(case):
    formula, want = COMPUTED[case]
    assert str(formula) == case.split(", no")[0].split(", bias")[0]
    size = X.shape[1 if formula.layout else -1]
    parameters = (WEIGHT[:size] if formula.weight_name else None), (BIAS[:size] if formula.bias_name else None)
    torch.testing.assert_close(formula.compute(X, *parameters, 1e-6), want())


@pytest.mark.parametrize(
    ("formula", "can_modulate"),
    [
        (NormFormula("layer_norm", "weight", "bias"), True),
        (NormFormula("rms_norm", "weight", None), True),
        (NormFormula("rms_norm", "weight", "bias"), False),
        (NormFormula("layer_norm", "weight", "bias", activation=ActivationOptions("relu")), False),
    ],
)
def test_what_may_follow_a_norm_is_known(formula, can_modulate):
    assert formula.can_modulate == can_modulate
    scale = torch.randn(2, 8)
    parameters = WEIGHT, (BIAS if formula.bias_name else None)
    if can_modulate:
        want = formula.compute(X, *parameters, 1e-6) * (1 + scale[:, None])
        torch.testing.assert_close(formula.compute(X, *parameters, 1e-6, scale=scale), want)


@pytest.mark.parametrize(
    ("formula", "rank", "size", "shape"),
    [
        (NormFormula("layer_norm", None, None), 2, (8,), (3, 8)),
        (NormFormula("layer_norm", None, None), 4, (8,), (3, 2, 2, 8)),
        (NormFormula("layer_norm", None, None), 3, (4, 8), (3, 4, 8)),
        (NormFormula("layer_norm", None, None), 2, (4, 8), None),
        (NormFormula("layer_norm", None, None, layout="nchw"), 4, (8,), (3, 8, 2, 2)),
        (NormFormula("layer_norm", None, None, layout="nchw"), 2, (8,), None),
        (NormFormula("layer_norm", None, None, layout="nchw"), 4, (4, 8), None),
        (NormFormula("group_norm", None, None, num_groups=2), 3, (8,), (3, 8, 2)),
    ],
    ids=str,
)
def test_samples_have_the_parameters_axes_where_the_norm_has_them(formula, rank, size, shape):
    assert formula.make_sample_shape(rank, size) == shape


def test_free_axes_have_the_given_sizes():
    rows, channels = (NormFormula("layer_norm", None, None, layout=layout) for layout in (None, "nchw"))
    assert rows.make_sample_shape(3, (8,), (5, 7, 9)) == (5, 7, 8)
    assert channels.make_sample_shape(4, (8,), (5, 7, 9)) == (5, 8, 7, 9)


def test_parameters_may_have_axes_of_one_element():
    formula = NormFormula("layer_norm", "weight", "bias")
    want = F.layer_norm(X, (8,), WEIGHT, BIAS, 1e-6)
    torch.testing.assert_close(formula.compute(X, WEIGHT[:, None, None], BIAS[:, None, None], 1e-6), want)


def test_an_offset_is_tried_with_a_weight_alone():
    assert {formula.weight_offset for formula in iterate_row_formulas("weight", None, NO_ACTIVATION)} == {0.0, 1.0}
    assert {formula.weight_offset for formula in iterate_row_formulas(None, "bias", NO_ACTIVATION)} == {0.0}
