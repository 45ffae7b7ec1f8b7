import csv
import sys

import pytest
from fusednorm.ops.layer_norm.backward.tile import BackwardTile
from fusednorm.ops.layer_norm.forward.sweep import ForwardSweep
from fusednorm.ops.layer_norm.forward.tile import ForwardTile

from benchmarks import tune
from benchmarks.timing import Quantiles
from benchmarks.tune import Cell, Timed, kernels_of, time_cell

SHORT = Cell("forward", 256, "float32")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr("benchmarks.cells.X_BYTES", 6 << 10)


class Timer:
    """A millisecond for the first call, and one less in a hundred for each that follows."""

    def __init__(self):
        self._ms = 1.0

    def __call__(self, call, repeats=30, warmup=3):
        call()
        now, self._ms = self._ms, 0.99 * self._ms
        return Quantiles(now, now, now)


@pytest.mark.parametrize(
    ("pass_", "configs"),
    [
        ("forward", [ForwardTile(2, 1, 256, 1), ForwardSweep(128, 1)]),
        ("backward", [BackwardTile(2, 256, 1, 3, 1, True), BackwardTile(4, 256, 2, 3, 1, False)]),
    ],
)
def test_the_fastest_comes_first(device, pass_, configs):
    rows = time_cell(Cell(pass_, 256, "float32"), configs, Timer(), device)
    assert [row.config for row in rows] == configs[::-1]
    tensors = 2 if pass_ == "forward" else 3
    assert rows[1].of_copy == pytest.approx(tensors / 2 / 0.99)


def test_what_disagrees_with_the_table_s_choice_is_not_timed(device, capsys):
    half_a_row = ForwardTile(1, 1, 128, 1)
    assert time_cell(SHORT, [half_a_row], Timer(), device) == []
    assert "result 0 is wrong" in capsys.readouterr().err


def test_tiles_that_differ_in_programs_alone_are_compiled_once():
    cell = Cell("backward", 256, "float32")
    tiles = [(cell, BackwardTile(2, 256, 1, 3, programs, True)) for programs in (1, 2, 3)]
    other = (cell, BackwardTile(2, 256, 1, 4, 1, True))
    assert kernels_of([*tiles, other]) == [tiles[0], other]


def test_a_run_writes_every_configuration_that_is_asked_for(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(tune, "run_in_workers", lambda task, items, *_: compiled.extend(items))
    monkeypatch.setattr(tune, "Timer", lambda: None)
    monkeypatch.setattr(tune, "time_cell", lambda cell, configs, timer: [Timed(0.5, 0.9, c) for c in configs])
    path = tmp_path / "tune.csv"
    only = ("--pass", "forward", "--dtype", "bfloat16", "--cols", "4096", "--only", "Sweep.*num_warps=4")
    monkeypatch.setattr(sys, "argv", ["tune", "--out", str(path), *only])
    tune.main()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["config"] for row in rows] == ["ForwardSweep(1024, 4, 0)", "ForwardSweep(2048, 4, 0)"]
    assert rows[0] | {"config": ""} == {
        "pass": "forward",
        "rows": "0",
        "cols": "4096",
        "dtype": "bfloat16",
        "config": "",
        "ms": "0.50000",
        "of_copy": "0.9000",
    }
    assert len(compiled) == 2
