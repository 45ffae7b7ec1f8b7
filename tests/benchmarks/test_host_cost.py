import pytest

from benchmarks.host_cost import CALLS, CELL, _checked, host_time
from benchmarks.oracle import Oracle
from benchmarks.problem import Problem, Run, Tensors


@pytest.mark.parametrize("provider", ["fusednorm", "torch"])
def test_what_is_timed_is_right(device, provider):
    problem = Problem(CELL, Tensors(device))
    for call in CALLS[provider](problem.x, problem.weight, problem.bias).values():
        assert Oracle(problem).error(Run(lambda call=call: _checked(call))) < 0.1


def test_queues_stay_short():
    events = []
    host_time(lambda: events.append("call"), lambda: events.append("wait"), rounds=3, calls_a_round=4)
    assert "".join(event[0] for event in events) == "wcccc" * 4 + "w"
