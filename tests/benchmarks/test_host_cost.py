from dataclasses import replace

import pytest

from benchmarks.harness.oracle import Oracle
from benchmarks.host_cost import CALLS, CELLS, calls_of, checked, host_time
from benchmarks.workload.problem import Problem, Run, Tensors


@pytest.mark.parametrize("provider", ["fusednorm", "torch"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_is_timed_is_right(cell, provider, device):
    if device == "cpu" and cell.op == "group_norm":
        # The interpreter takes minutes for what a GPU does in microseconds.
        cell = replace(cell, shape=(2, 8, 3, 5), groups=4)
    problem = Problem(cell, Tensors(device))
    for call in calls_of(provider, problem).values():
        assert Oracle(problem).error(Run(lambda call=call: checked(call, cell.pass_))) < 0.1


def test_every_operation_is_timed_beside_torch():
    for cell in CELLS:
        assert list(CALLS[cell.op])[:2] == ["fusednorm", "torch"]


def test_queues_stay_short():
    events = []
    host_time(lambda: events.append("call"), lambda: events.append("wait"), rounds=3, calls_a_round=4)
    assert "".join(event[0] for event in events) == "wcccc" * 4 + "w"
