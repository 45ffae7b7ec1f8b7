"""What a run found is on disk as soon as it is found, whatever becomes of the rest, and names the code."""

import argparse
import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import csv_results
from benchmarks.harness.csv_results import CsvResults, add_output_options, describe_run


def test_a_part_that_fails_costs_no_other(tmp_path, capsys):
    results = CsvResults(tmp_path / "a.csv", ("size", "rate"))
    with results.run_part("first"):
        results.add_row({"size": 1, "rate": 2})
        assert not results.exit_code
        raise RuntimeError("no such device")
    with results.run_part("second"):
        results.add_row({"size": 3, "rate": 4})
    assert results.exit_code == 1
    said = capsys.readouterr().out
    assert "first failed" in said
    assert "no such device" in said
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["size"], row["rate"]) for row in rows] == [("1", "2"), ("3", "4")]
    assert rows[0]["torch"]


def test_rows_are_written_at_once(tmp_path):
    results = CsvResults(tmp_path / "a.csv", ("size",))
    results.add_row({"size": 7})
    assert (tmp_path / "a.csv").read_text().rstrip().endswith(",7")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree whose only commit has `code.py` and a CSV among the results."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for path in (tmp_path / "code.py", results / "a.csv"):
        path.write_text("1\n")
    run_git(tmp_path, "init", "--quiet")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message", "First")
    monkeypatch.setattr(csv_results, "_ROOT", tmp_path)
    return tmp_path


def run_git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_says_which_commit_it_is_and_whether_code_differs_from_it(tree):
    head = run_git(tree, "rev-parse", "--short", "HEAD")
    (tree / "benchmarks" / "results" / "a.csv").write_text("measured\n")
    assert (describe_run()["commit"], describe_run()["dirty"]) == (head, 0)
    (tree / "code.py").write_text("2\n")
    assert (describe_run()["commit"], describe_run()["dirty"]) == (head, 1)


def test_a_commit_that_is_given_is_believed(tree):
    (tree / "code.py").write_text("2\n")
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    asked = parser.parse_args(["--out", str(tree / "deep" / "b.csv"), "--commit", "1a2b3c4d"])
    CsvResults(asked.out, ("size",), asked.commit).add_row({"size": 7})
    with (tree / "deep" / "b.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["commit"], row["dirty"], row["size"]) == ("1a2b3c4d", "0", "7")


@pytest.mark.parametrize("module", ["benchmarks.cpu", "benchmarks.serve"])
def test_a_command_is_called_as_it_was_called(module, monkeypatch):
    spec = importlib.util.find_spec(f"{module}.__main__" if module == "benchmarks.serve" else module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    assert parser.prog == f"python -m {module}"


def test_without_git_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_results, "_ROOT", tmp_path)
    assert (describe_run()["commit"], describe_run()["dirty"]) == ("", "")


def test_the_machine_is_known_without_a_gpu_and_a_package_that_is_missing_has_no_version(monkeypatch):
    monkeypatch.setenv("PATH", "")
    run = describe_run(packages=("torch", "no_such_package"))
    assert run["torch"]
    assert (run["no_such_package"], run["gpu"], run["driver"], run["commit"]) == ("", "", "", "")
    assert "cores" in str(run["machine"])


def test_a_gpu_is_named_once_whatever_their_number(monkeypatch):
    lines = "NVIDIA H200, 580.1\nNVIDIA H200, 580.1"
    monkeypatch.setattr(csv_results, "_run_command", lambda *command: lines if command[0] == "nvidia-smi" else "")
    run = describe_run()
    assert (run["gpu"], run["driver"]) == ("NVIDIA H200", "580.1")
    assert str(run["machine"]).endswith(" cores, NVIDIA H200")
