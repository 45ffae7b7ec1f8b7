from dataclasses import replace

import pytest
from normload.load.objectives import parse_objective


@pytest.mark.parametrize(
    "text",
    [
        *("", "p99", "p99<20", "p99<20%", "errors<1ms", "errors<1", "rate>5ms", "p<1ms", "p999<1ms", "p99=1ms"),
        "p99<-1ms",
    ],
)
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        parse_objective(text)


def test_values_are_shown_in_their_unit():
    shown = {text: parse_objective(text).format_value(0.0123) for text in ("p99<1s", "errors<1%", "rate>1")}
    assert shown == {"p99<1s": "12.30 ms", "errors<1%": "1.230%", "rate>1": "0.0/s"}


def test_an_objective_says_what_it_applies_to():
    objective = parse_objective("p99<20ms")
    assert objective.label == "p99<20ms"
    assert replace(objective, phase="steady").label == "p99<20ms in steady"
    assert replace(objective, operation="rms_norm", phase="a 10").label == "p99<20ms of rms_norm in a 10"
