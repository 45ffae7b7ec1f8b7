"""CSVs are measured by their commands; cells on several GPUs at once are joined as if one had measured them."""

import csv
import sys
from subprocess import CompletedProcess

import pytest

from benchmarks import __main__ as command
from benchmarks import measure
from benchmarks.harness import records

SPREAD = [name for name in measure.list_measurable_files() if measure.can_spread(name)]


@pytest.mark.parametrize("name", SPREAD)
def test_the_command_of_kernels_takes_a_shard(name, tmp_path, monkeypatch):
    words = measure.make_command(name, tmp_path / "part.csv", ["--shard", "2/4", "--seconds", "5"])
    assert words[:3] == [sys.executable, "-m", "benchmarks"]
    monkeypatch.setattr(sys, "argv", words[2:])
    asked = command._parse_arguments()
    assert (asked.shard, asked.out, asked.seconds) == ((2, 4), tmp_path / "part.csv", 5.0)


def test_what_waits_for_the_host_is_measured_alone():
    assert {"layer_norm.csv", "group_norm.csv", "h100.csv"} <= set(SPREAD)
    assert {"host.csv", "models.csv", "serve.csv", "cpu.csv"}.isdisjoint(SPREAD)


def test_files_are_measured_by_their_commands_one_after_the_other(tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr(
        measure.subprocess, "run", lambda words, check: run.append(words) or CompletedProcess(words, 0)
    )
    monkeypatch.setattr(
        sys,
        "argv",
        ["measure", "host.csv", "serve.csv", "--gpus", "2", "--out", str(tmp_path), "--commit", "1a2b3c4d"],
    )
    assert measure.main() == 0
    assert run == [
        measure.make_command(name, tmp_path / name, ["--commit", "1a2b3c4d"]) for name in ("host.csv", "serve.csv")
    ]
    assert run[1][1:3] == ["-m", "benchmarks.serve"]


def test_each_gpu_measures_its_part_and_the_rest_of_the_options_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure,
        "make_command",
        lambda name, out, further: [
            sys.executable,
            "-c",
            "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[2:], file=open(sys.argv[1], 'w'))",
            str(out),
            *further[1:],
        ],
    )
    parts = [tmp_path / "0", tmp_path / "1"]
    assert measure.measure_parts("layer_norm.csv", parts, ["--seconds", "5"])
    assert [part.read_text() for part in parts] == ["0 1/2 --seconds 5\n", "1 2/2 --seconds 5\n"]
    assert not measure.measure_parts("layer_norm.csv", [tmp_path / "missing" / "0"], [])


def test_cells_are_joined_in_the_order_of_the_former_file(write_csv, sweep_cell, tmp_path):
    short, middle, long = (sweep_cell(cols) for cols in (256, 1024, 8192))
    former = write_csv((short, "torch", 0.5), (middle, "torch", 0.5), name="former.csv")
    parts = [
        write_csv((long, "torch", 0.3), (middle, "copy", 1.0), (middle, "torch", 0.4), name="0"),
        write_csv((short, "torch", 0.6), name="1"),
    ]
    for known, order in (
        (former, ["256", "1024", "1024", "8192"]),
        (tmp_path / "x", ["8192", "1024", "1024", "256"]),
    ):
        measure.join_parts(parts, tmp_path / "joined.csv", known)
        rows = records.read_csv(tmp_path / "joined.csv")
        assert [row["shape"].split("x")[1] for row in rows] == order
        assert [row["provider"] for row in rows if row["shape"] == middle.shape_name] == ["copy", "torch"]
    with (tmp_path / "joined.csv").open(newline="") as file:
        assert next(csv.reader(file))[0] == "gpu"
