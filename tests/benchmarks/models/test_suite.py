from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.harness import records
from benchmarks.models import suite
from benchmarks.models.cells import ModelCell
from benchmarks.models.model_passes import StepOutcome
from benchmarks.models.suite import is_within_tolerance

from .conftest import patch

CELL = ModelCell("blocks", (2, 8, 2, 2))


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    """There is a host extension, as far as the suite can tell."""
    monkeypatch.setattr(suite, "replay_cache", SimpleNamespace(get_extension=object))


def test_each_provider_has_a_row_for_each_pass_and_variant(tiny, patching):
    rows = list(tiny.measure_rows(CELL, ("torch", "fusednorm"), pytest.fail))
    assert [(row["variant"], row["pass"], row["provider"]) for row in rows] == [
        (variant, pass_, provider)
        for variant in ("eager", "graph")
        for pass_ in ("step", "forward")
        for provider in ("torch", "fusednorm")
    ]
    row = rows[0]
    assert (row["op"], row["shape"], row["dtype"], row["layout"]) == ("model", "2x8x2x2", "bfloat16", "blocks")
    assert float(row["ms_p50"]) > 0
    assert (row["gbps"], row["of_copy"]) == ("", "")
    assert tuple(row) == records.COLUMNS


def test_a_model_that_computes_something_else_has_a_row_without_times(tiny, patching):
    patching(lambda model: patch(model, eps=3.0))
    notes = []
    rows = list(tiny.measure_rows(CELL, ("fusednorm", "torch"), notes.append))
    wrong = [row for row in rows if row["provider"] == "fusednorm"]
    assert {row["ms_p50"] for row in wrong} == {""}
    assert float(wrong[0]["max_error"]) > 0.05
    assert len(wrong) == len(rows) / 2
    assert "is not torch's StepOutcome(loss=" in notes[0]


def test_a_provider_that_fails_costs_its_rows_alone(tiny, patching):
    def broken(model):
        raise RuntimeError("no such kernel")

    patching(broken)
    notes = []
    rows = list(tiny.measure_rows(CELL, ("fusednorm", "torch", "liger"), notes.append))
    assert {row["provider"] for row in rows} == {"torch"}
    assert "RuntimeError: no such kernel" in notes[0]
    assert notes[1].startswith("liger: model blocks 2x8x2x2 eager graph, step forward: ")


def test_a_patch_that_replaces_nothing_is_not_timed(tiny, patching):
    patching(lambda model: "skipped: all")
    notes = []
    assert not list(tiny.measure_rows(CELL, ("fusednorm",), notes.append))
    assert "replaced nothing: skipped: all" in notes[0]


def test_a_model_that_is_not_installed_is_a_line(tiny, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    notes = []
    assert not list(tiny.measure_rows(ModelCell("gpt2", (1, 512)), ("torch",), notes.append))
    assert notes[0].startswith("model gpt2 1x512 eager graph, step forward: ")


def test_a_graph_that_computes_something_else_has_no_time(tiny, patching, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.models.model_passes.ModelPasses.replay_step", lambda self, graph: StepOutcome(1e6, float("nan"))
    )
    notes = []
    rows = list(tiny.measure_rows(CELL, ("torch",), notes.append))
    times = {(row["variant"], row["pass"]): row["ms_p50"] for row in rows}
    assert times["graph", "step"] == ""
    assert times["graph", "forward"]
    assert "graph of step: other results than torch's" in notes[0]


def test_a_pass_that_fails_leaves_the_other(tiny, patching, monkeypatch):
    def forward(self):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr("benchmarks.models.model_passes.ModelPasses._run_forward", forward)
    notes = []
    rows = list(tiny.measure_rows(ModelCell("blocks", (2, 8, 2, 2), ("eager",)), ("torch",), notes.append))
    assert [row["pass"] for row in rows] == ["step"]
    assert "forward: OutOfMemoryError: too much" in notes[0]


def test_only_torch_and_fusednorm_are_compiled_after_compiling_ahead_once(tiny, patching, monkeypatch):
    compiled, ahead = [], []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    monkeypatch.setattr(suite, "run_in_workers", lambda task, work, workers, seconds: ahead.append((work, seconds)))
    cell = ModelCell("blocks", (2, 8, 2, 2), ("compile",), ("step",))
    tiny.compile_ahead((CELL, cell), ("torch", "fusednorm", "liger"), 100.0)
    assert not ahead
    for _ in range(2):
        rows = list(tiny.measure_rows(cell, ("torch", "fusednorm", "liger"), pytest.fail))
        assert [(row["provider"], row["variant"]) for row in rows] == [
            ("torch", "compile"),
            ("fusednorm", "compile"),
        ]
    assert ahead == [([(cell, "torch"), (cell, "fusednorm")], 100.0 * suite._SHARE_OF_COMPILING)]
    assert all(isinstance(model, nn.Sequential) for model in compiled)
    assert len(compiled) == 4


def test_what_is_compiled_ahead_is_what_the_cell_times(tiny, patching, monkeypatch):
    compiled, called = [], []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    monkeypatch.setattr(
        "benchmarks.models.model_passes.ModelPasses._train_step", lambda self: called.append("step")
    )
    monkeypatch.setattr(suite, "limit_inductor", lambda: None)
    suite.compile_once((ModelCell("blocks", (2, 8, 2, 2), ("compile",), ("step",)), "fusednorm"))
    assert (len(compiled), called) == (1, ["step"])


def test_ours_without_the_extension_is_said_once(tiny, patching, monkeypatch):
    monkeypatch.setattr(suite, "replay_cache", SimpleNamespace(get_extension=lambda: None))
    notes = []
    cell = ModelCell("blocks", (2, 8, 2, 2), ("eager",), ("forward",))
    for _ in range(2):
        assert list(tiny.measure_rows(cell, ("fusednorm",), notes.append))
    assert notes == ["fusednorm is timed without its host extension: python -m fusednorm.host compiles it"]


@pytest.mark.parametrize(
    ("outcome", "right"),
    [
        (StepOutcome(10.05, 2.0), True),
        (StepOutcome(10.2, 2.0), False),
        (StepOutcome(10.0, 2.2), False),
        (StepOutcome(float("nan"), 2.0), False),
    ],
)
def test_what_rounding_explains(outcome, right):
    assert is_within_tolerance(outcome, StepOutcome(10.0, 2.0)) is right
