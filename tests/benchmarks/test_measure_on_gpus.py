"""The cells of a CSV are measured on several GPUs at once, and joined as if one had measured them."""

import csv
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import measure_on_gpus
from benchmarks.harness import records


@pytest.mark.parametrize("name", measure_on_gpus.list_shardable_files())
def test_the_command_of_each_file_takes_a_shard(name, tmp_path, monkeypatch):
    words = measure_on_gpus.make_command(name, tmp_path / "part.csv", "2/4", ["--seconds", "5"])
    assert words[:3] == [sys.executable, "-m", "benchmarks"]
    monkeypatch.setattr(sys, "argv", words[2:])
    asked = command._parse_arguments()
    assert (asked.shard, asked.out, asked.seconds) == ((2, 4), tmp_path / "part.csv", 5.0)


def test_each_gpu_measures_its_part_and_the_rest_of_the_options_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure_on_gpus,
        "make_command",
        lambda name, part, shard, further: [
            sys.executable,
            "-c",
            "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[2:], file=open(sys.argv[1], 'w'))",
            *(str(part), shard, *further),
        ],
    )
    parts = [tmp_path / "0", tmp_path / "1"]
    assert measure_on_gpus.measure_parts("host.csv", parts, ["--seconds", "5"])
    assert [part.read_text() for part in parts] == ["0 1/2 --seconds 5\n", "1 2/2 --seconds 5\n"]
    assert not measure_on_gpus.measure_parts("host.csv", [tmp_path / "missing" / "0"], [])


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
        measure_on_gpus.join_parts(parts, tmp_path / "joined.csv", known)
        rows = records.read_csv(tmp_path / "joined.csv")
        assert [row["shape"].split("x")[1] for row in rows] == order
        assert [row["provider"] for row in rows if row["shape"] == middle.shape_name] == ["copy", "torch"]
    with (tmp_path / "joined.csv").open(newline="") as file:
        assert next(csv.reader(file))[0] == "gpu"
