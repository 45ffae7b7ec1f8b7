import csv
import sys

from benchmarks.tune.layer_norm import __main__ as tune
from benchmarks.tune.layer_norm.trials import TimedRowConfig


def test_a_run_writes_every_configuration_that_is_asked_for(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(tune, "run_in_workers", lambda task, items, *_: compiled.extend(items))
    monkeypatch.setattr(tune, "DeviceTimer", lambda: None)
    monkeypatch.setattr(
        tune, "time_cell", lambda cell, configs, timer: [TimedRowConfig(0.5, 0.9, c) for c in configs]
    )
    path = tmp_path / "tune.csv"
    only = ("--pass", "forward", "--dtype", "bfloat16", "--cols", "4096", "--only", "Sweep.*num_warps=4")
    only += ("--activation", "silu")
    monkeypatch.setattr(sys, "argv", ["tune", "--out", str(path), *only])
    tune.main()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["config"] for row in rows] == [f"LayerNormForwardSweep({block}, 4, 0)" for block in (1024, 2048)]
    assert {name: rows[0][name] for name in tune.COLUMNS if name != "config"} == {
        "pass": "forward",
        "rows": "0",
        "cols": "4096",
        "positions": "0",
        "dtype": "bfloat16",
        "activation": "silu",
        "ms": "0.50000",
        "of_copy": "0.9000",
    }
    assert len(compiled) == 2
