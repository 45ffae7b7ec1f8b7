"""What the tuning run of GroupNorm sets out to do: everything that is needed, in the time of one run."""

import csv

import pytest
from fusednorm.ops.group_norm.contiguous.backward.split import GroupNormBackwardSplit
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.contiguous.forward.sweep import GroupNormForwardSweep

from benchmarks.harness.csv_results import CsvResults
from benchmarks.tune.group_norm import trials
from benchmarks.tune.group_norm.__main__ import LAYOUTS, SHAPES
from benchmarks.tune.group_norm.trials import (
    GroupNormTuningCell,
    TuningItem,
    select_distinct_kernels,
    time_cell,
    time_item,
)
from tests.benchmarks.harness.fake_timer import Timer

SMALL = GroupNormTuningCell("forward", (1, 64, 12), "nchw", "float32")


CELLS = {
    pass_: [GroupNormTuningCell(pass_, shape, layout, "bfloat16") for shape in SHAPES for layout in LAYOUTS]
    for pass_ in ("forward", "backward")
}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_kernels_are_few_enough_to_compile_at_once_and_come_in_the_order_of_the_cells(pass_):
    kernels = select_distinct_kernels({cell: list(cell.iterate_configs()) for cell in CELLS[pass_]})
    assert list(kernels) == CELLS[pass_]
    assert sum(map(len, kernels.values())) <= 450


def test_kernels_that_cells_share_are_compiled_for_the_first():
    cell = GroupNormTuningCell("forward", (8, 512, 64, 64), "nchw", "bfloat16")
    fewer = GroupNormTuningCell("forward", (7, 512, 64, 64), "nchw", "bfloat16")
    configs = list(cell.iterate_configs())
    kernels = select_distinct_kernels({cell: configs, fewer: configs})
    assert kernels[cell]
    assert not kernels[fewer]


@pytest.mark.parametrize(
    ("cell", "configs"),
    [
        (SMALL, [GroupNormForwardResident(1, 1), GroupNormForwardSweep(4, 1)]),
        (
            GroupNormTuningCell("backward", (1, 64, 12), "nchw", "float32"),
            [GroupNormBackwardSplit(2, 2, 1, 1), GroupNormBackwardSplit(1, 2, 1, 1)],
        ),
    ],
)
def test_the_fastest_comes_first(cell, configs, device):
    outcome = time_cell(cell, configs, Timer(), device)
    assert [row.config for row in outcome.timed] == configs[::-1]
    tensors = 2 if cell.pass_ == "forward" else 3
    assert outcome.timed[1].of_copy == pytest.approx(tensors / 2 / 0.99)
    assert not outcome.failed


class Refusing(Timer):
    """Times the copy and refuses everything after it."""

    def __init__(self, *errors):
        super().__init__()
        self._errors = iter((None, *errors))

    def __call__(self, call, repeats=30, warmup=3):
        error = next(self._errors)
        if error is not None:
            raise RuntimeError(error)
        return super().__call__(call)


def test_what_fails_is_written_with_its_error_and_what_lasts_ends_the_cell(device, monkeypatch, tmp_path, capsys):
    refusing = Refusing(None, "too many\nblocks", "CUDA error: misaligned address")
    monkeypatch.setattr(trials, "_timer", lambda: refusing)
    monkeypatch.setattr(trials, "time_cell", lambda *arguments: time_cell(*arguments, device))
    configs = [GroupNormForwardSweep(units, 1) for units in (2, 4, 8, 16)]
    results = CsvResults(tmp_path / "tune.csv", trials.COLUMNS)
    with pytest.raises(RuntimeError, match="CUDA error"):
        time_item(TuningItem(SMALL, configs, results, float("inf")))
    with (tmp_path / "tune.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["config"] for row in rows] == [f"GroupNormForwardSweep({units},1)" for units in (2, 4, 8)]
    assert [row["error"] for row in rows] == ["", "too many blocks", "CUDA error: misaligned address"]
    assert rows[0]["ms"] == "0.99000"
    assert rows[0]["of_copy"] == "1.0101"
    line = capsys.readouterr().out
    assert line.startswith("forward float32 1x64x12 nchw, copy ")
    assert line.endswith(": 1.010 990.0 us GroupNormForwardSweep(2,1); 2 failed: too many blocks\n")


def test_no_cell_is_begun_too_late(tmp_path):
    results = CsvResults(tmp_path / "tune.csv", trials.COLUMNS)
    time_item(TuningItem(SMALL, [GroupNormForwardSweep(4, 1)], results, deadline_s=0.0))
    assert not results.rows
