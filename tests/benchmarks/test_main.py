import argparse
import csv
import sys

import pytest

from benchmarks.__main__ import _providers, _shard, main, time_cell
from benchmarks.harness import records
from benchmarks.harness.timing import Quantiles
from benchmarks.providers.own import ours
from benchmarks.providers.registry import PROVIDERS
from benchmarks.workload.problem import Run, Tensors


def timer(call, before=None):
    """One millisecond, whatever is called."""
    if before is not None:
        before()
    call()
    return Quantiles(1.0, 1.0, 1.0)


def test_a_cell_has_a_row_for_the_copy_and_for_each_provider_that_has_it(problem):
    providers = {name: PROVIDERS[name] for name in ("fusednorm", "torch", "tutorial")}
    rows = time_cell(problem(pass_="backward"), providers, timer, pytest.fail)
    assert [(row["provider"], row["of_copy"]) for row in rows] == [
        ("copy", "1.000"),
        ("fusednorm", "1.500"),
        ("torch", "1.500"),
    ]


def test_what_is_wrong_is_not_timed(problem):
    notes = []

    def wrong(problem):
        return Run(lambda: (ours(problem).call()[0] + 1,))

    rows = time_cell(problem(), {"wrong": wrong, "fusednorm": ours}, timer, notes.append)
    assert [row["provider"] for row in rows] == ["copy", "fusednorm"]
    assert notes[0].startswith("wrong: layer_norm forward plain 6x256 float32 rows: result 0 is wrong by 1")


def test_a_provider_that_raises_costs_its_row_alone(problem):
    notes = []

    def broken(problem):
        raise RuntimeError("no such kernel")

    rows = time_cell(problem(), {"broken": broken, "fusednorm": ours}, timer, notes.append)
    assert [row["provider"] for row in rows] == ["copy", "fusednorm"]
    assert "no such kernel" in notes[0]


def test_an_unknown_provider_is_named():
    with pytest.raises(argparse.ArgumentTypeError, match="got apex"):
        _providers("torch,apex")


@pytest.fixture
def run(monkeypatch, device, tmp_path):
    """Run the command with a timer that needs no GPU, and read what it wrote."""
    monkeypatch.setattr("benchmarks.__main__.Timer", lambda: timer)
    monkeypatch.setattr("benchmarks.__main__.Tensors", lambda: Tensors(device))
    monkeypatch.setattr(records, "machine", lambda commit: {"gpu": "none", "commit": commit})

    def run_main(*arguments):
        path = tmp_path / "deep" / "run.csv"
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--out", str(path), "--warm", "0", *arguments])
        main()
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return run_main


def test_a_run_writes_the_chosen_cells_and_providers(run):
    chosen = ("--cells", "layer_norm .* 1x4096 ", "--providers", "fusednorm,torch", "--commit", "abc")
    rows = run("--suite", "small", "tutorial", *chosen)
    assert [(row["shape"], row["provider"], row["commit"]) for row in rows] == [
        ("1x4096", "copy", "abc"),
        ("1x4096", "fusednorm", "abc"),
        ("1x4096", "torch", "abc"),
    ]
    assert tuple(rows[0]) == records.COLUMNS


def test_shards_share_out_the_chosen_cells(run):
    chosen = ("--cells", "layer_norm .* 1", "--providers", "torch")
    shapes = [
        {row["shape"] for row in run("--suite", "small", *chosen, "--shard", f"{index}/2")} for index in (1, 2)
    ]
    assert shapes == [{"1x4096", "16x8192"}, {"128x4096"}]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/x"])
def test_a_shard_is_one_of_its_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="I from 1 to N"):
        _shard(text)


def test_only_what_will_be_timed_is_compiled_ahead(run, monkeypatch):
    warmed = []
    monkeypatch.setattr("benchmarks.__main__.warm", lambda *arguments: warmed.append(arguments))
    chosen = ("--cells", "layer_norm .* 1x4096 ", "--providers", "fusednorm,torch")
    run("--suite", "small", "tutorial", *chosen, "--warm", "5")
    ((cells, providers, seconds),) = warmed
    assert [cell.name for cell in cells] == ["layer_norm forward plain 1x4096 bfloat16 rows"]
    assert (list(providers), seconds) == (["fusednorm", "torch"], 5)


def test_no_cell_is_started_out_of_time(run, capsys):
    assert run("--suite", "small", "--seconds", "-1") == []
    assert "out of time after 0 of 10 cells" in capsys.readouterr().err
