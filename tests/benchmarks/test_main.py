import argparse
import csv
import sys

import pytest
import torch

from benchmarks.__main__ import _parse_providers, _parse_shard, main
from benchmarks.harness import records
from benchmarks.harness.timing import TimeQuantiles
from benchmarks.workload.problems import TensorCache


def one_millisecond(call, before=None):
    call()
    return TimeQuantiles(1.0, 1.0, 1.0)


def test_an_unknown_provider_is_named():
    with pytest.raises(argparse.ArgumentTypeError, match="got apex"):
        _parse_providers("torch,apex")


@pytest.fixture
def run(monkeypatch, device, tmp_path):
    """Run the command with a timer that needs no GPU, and read what it wrote."""
    monkeypatch.setattr("benchmarks.kernels.suite.DeviceTimer", lambda: one_millisecond)
    monkeypatch.setattr("benchmarks.kernels.suite.TensorCache", lambda: TensorCache(device))

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
    assert tuple(rows[0])[-len(records.COLUMNS) :] == records.COLUMNS


def test_shards_share_out_the_chosen_cells(run):
    chosen = ("--cells", "layer_norm .* 1", "--providers", "torch")
    shapes = [
        {row["shape"] for row in run("--suite", "small", *chosen, "--shard", f"{index}/2")} for index in (1, 2)
    ]
    assert shapes == [{"1x4096", "16x8192"}, {"128x4096"}]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/x"])
def test_a_shard_is_one_of_its_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="I from 1 to N"):
        _parse_shard(text)


def test_only_what_will_be_timed_is_compiled_ahead(run, monkeypatch):
    warmed = []
    monkeypatch.setattr("benchmarks.kernels.suite.compile_cells", lambda *arguments: warmed.append(arguments))
    chosen = ("--cells", "layer_norm .* 1x4096 ", "--providers", "fusednorm,torch")
    run("--suite", "small", "tutorial", *chosen, "--warm", "5")
    ((cells, providers, seconds),) = warmed
    assert [cell.name for cell in cells] == ["layer_norm forward plain 1x4096 bfloat16 rows"]
    assert (list(providers), seconds) == (["fusednorm", "torch"], 5)


def test_no_cell_is_started_out_of_time(run, capsys):
    assert run("--suite", "small", "--seconds", "-1") == []
    assert "out of time after 0 of 10 cells" in capsys.readouterr().err


@pytest.mark.parametrize("is_built", [True, False])
def test_the_host_extension_is_there_before_anything_is_timed_on_a_gpu(is_built, run, monkeypatch, capsys):
    order = []

    def ensure_built():
        order.append("extension")
        if not is_built:
            raise RuntimeError("no compiler")

    monkeypatch.setenv("FUSEDNORM_BUILD_EXTENSION", "1")
    monkeypatch.setattr("benchmarks.harness.compile_ahead.ensure_extension_built", ensure_built)
    monkeypatch.setattr("benchmarks.kernels.suite.compile_cells", lambda *arguments: order.append("kernels"))
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        assert run("--suite", "small", "--seconds", "-1", "--warm", "1") == []
    assert order == ["kernels", "extension", "kernels"]
    assert ("there is no host extension: no compiler" in capsys.readouterr().err) is not is_built


@pytest.mark.parametrize("name", ["host", "models"])
def test_suites_of_whole_programs_run_alone_and_end_in_time(name, run, capsys):
    assert run("--suite", name, "--seconds", "-1") == []
    assert "out of time after 0 of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--suite", name, "plain")
    assert f"run alone, got --suite {name} plain" in capsys.readouterr().err
