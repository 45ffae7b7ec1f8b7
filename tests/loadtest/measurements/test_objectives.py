import math

import pytest
from normload.measurements.objectives import parse_objective

from tests.loadtest.conftest import made_result


def value(text, result):
    objective = parse_objective(text)
    whole = result.all_phases
    return objective.compute_value(whole.total, whole.rate)


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


@pytest.mark.parametrize(
    "text", ["", "p99", "p99<20", "p99<20%", "errors<1ms", "rate>5ms", "p<1ms", "p999<1ms", "p99=1ms", "p99<-1ms"]
)
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        parse_objective(text)


def test_values_are_shown_in_their_unit():
    shown = {text: parse_objective(text).format_value(0.0123) for text in ("p99<1s", "errors<1%", "rate>1")}
    assert shown == {"p99<1s": "12.30 ms", "errors<1%": "1.230%", "rate>1": "0.0/s"}
