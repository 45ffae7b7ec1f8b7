"""A CSV is to be measured again when much of its code has changed since, or when nobody knows which code it was."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.report import result_files, stale_results
from benchmarks.report.result_files import ResultFile
from benchmarks.report.stale_results import count_changed_lines, judge_run, main


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with two folders of code of ten lines each."""
    run_git(tmp_path, "init", "--quiet")
    for folder in ("kernels", "service"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("".join(f"{number}\n" for number in range(10)))
    commit(tmp_path)
    monkeypatch.setattr(stale_results, "ROOT", tmp_path)
    return tmp_path


def run_git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    run_git(folder, "add", ".")
    run_git(folder, "commit", "--quiet", "--message", "Change")
    return run_git(folder, "rev-parse", "--short", "HEAD")


def change_lines(folder: Path, count: int, name: str = "kernels/code.py") -> None:
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join(["x\n"] * count + lines[count:]))
    commit(folder)


def test_lines_count_once_and_only_those_of_the_code(repository):
    first = run_git(repository, "rev-parse", "--short", "HEAD")
    assert count_changed_lines(first, ("kernels",)) == 0
    change_lines(repository, 3)
    (repository / "kernels" / "more.py").write_text("1\n2\n")
    (repository / "kernels" / "image.bin").write_bytes(b"\0\1")
    commit(repository)
    change_lines(repository, 7, "service/code.py")
    assert count_changed_lines(first, ("kernels",)) == 5
    assert count_changed_lines(first, ("kernels", "service")) == 12
    assert count_changed_lines("1a2b3c4d", ("kernels",)) is None


def test_rows_hold_until_more_than_the_stated_number_of_lines_changed(repository, monkeypatch):
    monkeypatch.setattr(stale_results, "MOST_LINES", 3)
    first = run_git(repository, "rev-parse", "--short", "HEAD")
    change_lines(repository, 3)
    assert judge_run(first, False, ("kernels",)) == (f"{first}, 3 lines", True)
    change_lines(repository, 4)
    assert judge_run(first, False, ("kernels",)) == (f"{first}, 4 lines", False)


def test_rows_of_no_known_and_clean_commit_do_not_hold(repository):
    first = run_git(repository, "rev-parse", "--short", "HEAD")
    assert judge_run("", False, ("kernels",)) == ("no commit", False)
    assert judge_run("1a2b3c4d", False, ("kernels",)) == ("1a2b3c4d, which git does not know", False)
    assert judge_run(first, True, ("kernels",)) == (f"{first} with changes, 0 lines", False)


def test_the_command_lists_every_file_and_fails_for_one_that_is_stale(repository, monkeypatch, capsys):
    first = run_git(repository, "rev-parse", "--short", "HEAD")
    files = {name: ResultFile(name, "H200", "python -m benchmarks", ("kernels",)) for name in ("a.csv", "b.csv")}
    monkeypatch.setattr(stale_results, "load_result_files", lambda: files)
    monkeypatch.setattr(result_files, "RESULTS", repository)
    for name in files:
        (repository / name).write_text(f"commit,dirty\n{first},0\n")
    assert main() == 0
    (repository / "b.csv").write_text(f"commit,dirty\n{first},0\n,\n")
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[3:] == [
        f"ok    a.csv: {first}, 0 lines",
        f"ok    b.csv: {first}, 0 lines",
        "STALE b.csv: no commit",
        "1 of 2 files are to be measured again; at most 1,000 lines may change",
    ]
