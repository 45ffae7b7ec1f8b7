import csv
import re
import sys

from benchmarks.__main__ import ALONE, main
from benchmarks.models.cells import ModelCell


def test_rows_are_written_for_the_providers_that_the_suite_has(tiny, patching, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ALONE, "models", lambda: tiny)
    monkeypatch.setattr(type(tiny), "cells", (ModelCell("blocks", (2, 8, 2, 2), ("eager",), ("step",)),))
    path = tmp_path / "models.csv"
    chosen = ["--suite", "models", "--providers", "torch,fusednorm,tutorial", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *chosen])
    main()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["provider"], row["shape"]) for row in rows] == [
        ("model", "torch", "2x8x2x2"),
        ("model", "fusednorm", "2x8x2x2"),
    ]
    assert re.search(r"eager, step: torch step eager \d+\.\d+ ms  fusednorm step", capsys.readouterr().err)
