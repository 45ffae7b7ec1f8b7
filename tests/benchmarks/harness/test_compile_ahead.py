import os

import pytest

from benchmarks.harness import compile_ahead
from benchmarks.workload.cell_suites import list_cells


@pytest.fixture
def taken_on(monkeypatch):
    """What the workers are given, instead of starting them."""
    items = []

    def record(task, work, workers, seconds):
        assert task is compile_ahead.run_provider_once
        items.extend(work)
        return len(work)

    monkeypatch.setattr(compile_ahead, "run_in_workers", record)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/restored/afterwards")
    return items


def test_only_what_another_process_finds_is_compiled(taken_on, capsys):
    cells = list_cells(["small"])
    compile_ahead.compile_cells(cells, ["fusednorm", "torch", "compile", "liger_cute", "helion"], seconds=1)
    assert taken_on == [(cell, provider) for cell in cells for provider in ("fusednorm", "compile")]
    assert "20 of 20 begun" in capsys.readouterr().err


def test_the_place_of_the_cache_is_settled_before_workers_start(taken_on, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    compile_ahead.compile_cells([], ["fusednorm"], seconds=1)
    assert os.environ["TRITON_CACHE_DIR"]


def test_a_chosen_place_stays(taken_on):
    compile_ahead.compile_cells([], ["fusednorm"], seconds=1)
    assert os.environ["TRITON_CACHE_DIR"] == "/restored/afterwards"


@pytest.mark.parametrize(("switch", "builds"), [("0", 0), ("1", 1)])
def test_the_extension_is_built_before_calls_are_timed_unless_that_is_off(monkeypatch, switch, builds):
    built = []
    monkeypatch.setattr(compile_ahead.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compile_ahead, "ensure_extension_built", lambda: built.append("extension"))
    monkeypatch.setenv("FUSEDNORM_BUILD_EXTENSION", switch)
    compile_ahead.wait_for_extension()
    assert len(built) == builds
