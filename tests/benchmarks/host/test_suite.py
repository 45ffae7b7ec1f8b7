from dataclasses import replace

import pytest

from benchmarks.harness.timing import TimeQuantiles
from benchmarks.host import suite
from benchmarks.host.calls import HostCall, make_call
from benchmarks.host.cells import CELLS
from benchmarks.host.suite import HostSuite
from benchmarks.workload.problems import TensorCache

GROUPS = {"shape": (2, 8, 3, 5), "groups": 4}


@pytest.fixture
def host(monkeypatch, device):
    def timed(call, device):
        call()
        return TimeQuantiles(1.0, 2.0, 3.0)

    monkeypatch.setattr(suite, "WAYS", {"queued": timed, "loop": timed})
    return HostSuite(device=object, tensors=lambda: TensorCache(device))


def test_each_provider_has_a_row_for_each_way(host):
    rows = list(host.measure_rows(replace(CELLS[0], shape=(6, 64)), ("torch", "fusednorm_python"), pytest.fail))
    assert [(row["provider"], row["variant"], row["pass"], row["ms_p50"]) for row in rows] == [
        (provider, way, "forward", "2.00000")
        for provider in ("torch", "fusednorm_python")
        for way in ("queued", "loop")
    ]


def test_the_activation_is_part_of_the_variant(host):
    cell = next(cell for cell in CELLS if cell.variant == "silu")
    rows = list(host.measure_rows(replace(cell, **GROUPS), ("torch",), pytest.fail))
    assert [row["variant"] for row in rows] == ["queued_silu", "loop_silu"]


def test_what_is_wrong_or_fails_is_a_line_and_the_others_are_timed(host, monkeypatch):
    def wrong_or_none(provider, problem):
        made = make_call("torch", problem)
        if provider == "fusednorm_python":
            return HostCall(lambda: made.call()[0] + 1, lambda y: (y,))
        if provider == "liger":
            raise ImportError("no Liger")
        return made

    monkeypatch.setattr(suite, "make_call", wrong_or_none)
    notes = []
    cell = replace(CELLS[0], shape=(6, 64))
    rows = list(host.measure_rows(cell, ("fusednorm_python", "liger", "torch"), notes.append))
    assert {row["provider"] for row in rows} == {"torch"}
    assert "result 0 is wrong by 1" in notes[0]
    assert notes[1].startswith("liger: layer_norm forward")


def test_what_is_compiled_ahead_is_the_call_itself(monkeypatch, device):
    called = []
    monkeypatch.setattr(suite, "TensorCache", lambda: TensorCache(device))
    monkeypatch.setattr(suite, "make_call", lambda provider, problem: called.append((provider, problem.cell)))
    suite.make_call_once((CELLS[0], "fusednorm"))
    assert called == [("fusednorm", CELLS[0])]
