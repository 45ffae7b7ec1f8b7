import pytest

from benchmarks.harness.timing import TimeQuantiles
from benchmarks.kernels.suite import measure_cell
from benchmarks.providers.own_provider import make_own_run
from benchmarks.providers.registry import PROVIDERS
from benchmarks.workload.problems import ProviderRun


def timer(call, before=None):
    """One millisecond, whatever is called."""
    if before is not None:
        before()
    call()
    return TimeQuantiles(1.0, 1.0, 1.0)


def test_a_cell_has_a_row_for_the_copy_and_for_each_provider_that_has_it(problem):
    providers = {name: PROVIDERS[name] for name in ("fusednorm", "torch", "tutorial")}
    rows = list(measure_cell(problem(pass_="backward"), providers, timer, pytest.fail))
    assert [(row["provider"], row["of_copy"]) for row in rows] == [
        ("copy", "1.000"),
        ("fusednorm", "1.500"),
        ("torch", "1.500"),
    ]


def test_what_is_wrong_is_not_timed(problem):
    notes = []

    def wrong(problem):
        return ProviderRun(lambda: (make_own_run(problem).call()[0] + 1,))

    rows = list(measure_cell(problem(), {"wrong": wrong, "fusednorm": make_own_run}, timer, notes.append))
    assert [row["provider"] for row in rows] == ["copy", "fusednorm"]
    assert notes[0].startswith("wrong: layer_norm forward plain 6x256 float32 rows: result 0 is wrong by 1")


def test_a_provider_that_raises_costs_its_row_alone(problem):
    notes = []

    def broken(problem):
        raise RuntimeError("no such kernel")

    rows = list(measure_cell(problem(), {"broken": broken, "fusednorm": make_own_run}, timer, notes.append))
    assert [row["provider"] for row in rows] == ["copy", "fusednorm"]
    assert "no such kernel" in notes[0]
