"""Objectives over a whole run, and over one phase or operation of it."""

import math
from dataclasses import replace

import pytest
from normload.load.objectives import parse_objective
from normload.measurements.objective_outcomes import evaluate_objective

from tests.loadtest.conftest import made_result


def value(text, result, **of):
    return evaluate_objective(replace(parse_objective(text), **of), result)[1]


RESULT = made_result([0.010] * 990 + [0.050] * 9, errors=1)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("p99<20ms", True),
        ("p50 < 9.9ms", False),
        ("p99.9<40ms", False),
        ("p99.9<60000us", True),
        ("max<0.04s", False),
        ("errors<0.1%", False),
        ("errors<=0.1%", True),
        ("errors<0.002", True),
        ("rate>99", True),
        ("rate>=120/s", False),
    ],
)
def test_objectives_pass_or_fail(text, passes):
    assert parse_objective(text).is_met(value(text, RESULT)) is passes


def test_nothing_is_met_by_nothing():
    empty = made_result([], errors=3)
    for text in ("p99<20ms", "max<1s", "errors<5%", "rate>1"):
        assert not parse_objective(text).is_met(value(text, empty))
    assert math.isnan(value("p99<20ms", empty))


def test_an_objective_may_be_of_one_phase():
    result = made_result([0.010] * 10)
    (slow,) = made_result([0.100] * 10, errors=10).phases
    result.phases.append(replace(slow, phase=replace(slow.phase, name="slow")))
    assert (
        value("max<1s", result) == value("max<1s", result, phase="slow") > value("max<1s", result, phase="steady")
    )
    assert value("errors<1%", result, phase="slow") == 0.5
    assert value("errors<1%", result, phase="steady") == 0.0
    assert value("rate>1", result, phase="slow") == 1.0
    assert not evaluate_objective(replace(parse_objective("errors<1%"), phase="never run"), result)[2]


def test_an_objective_may_be_of_one_operation():
    result = made_result([0.010] * 10, errors=5)
    (operation,) = result.list_operations()
    for text in ("p50<1s", "max<1s", "errors<1%", "rate>1"):
        assert value(text, result, operation=operation) == value(text, result)
        assert not value(text, result, operation="another") > 0
