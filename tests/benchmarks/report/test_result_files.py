"""Every CSV is declared once, with a command that exists and code that exists."""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as command
from benchmarks.report import result_files
from benchmarks.report.documents import ROOT, TEMPLATES
from benchmarks.report.result_files import RESULTS, ResultFile, load_history, load_result_files

FILES = load_result_files()


def test_each_csv_is_declared_once():
    assert not FILES.keys() & load_history().keys()
    assert FILES.keys() | load_history().keys() == {path.name for path in RESULTS.glob("*.csv")}


@pytest.mark.parametrize("name", FILES)
def test_code_and_command_exist(name, monkeypatch, capsys):
    file = FILES[name]
    assert file.code
    assert [path for path in file.code if not (ROOT / path).exists()] == []
    python, option, module, *options = shlex.split(file.command)
    assert (python, option) == ("python", "-m")
    assert find_spec(module) is not None
    assert "--out" not in options
    if module == "benchmarks":
        monkeypatch.setattr("sys.argv", [module, *options, "--out", name])
        command._parse_arguments()
    elif options:
        is_package = find_spec(module).submodule_search_locations is not None
        monkeypatch.setattr("sys.argv", [module, "--help"])
        with pytest.raises(SystemExit):
            import_module(f"{module}.__main__" if is_package else module).main()
        described = capsys.readouterr().out
        assert [each for each in options if each.startswith("--") and f"{each} " not in described] == []


def test_each_csv_is_named_by_a_document():
    texts = [path.read_text(encoding="utf-8") for path in (*(ROOT / "docs").rglob("*.md"), *TEMPLATES.iterdir())]
    unnamed = [
        name for name in (*FILES, *load_history()) if not any(re.search(rf"\b{name}", text) for text in texts)
    ]
    assert unnamed == []


def test_commits_are_those_of_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    file = ResultFile("a.csv", "H200", "python -m benchmarks", ("kernels",))
    (tmp_path / "a.csv").write_text("commit,dirty,ms\nabc,0,1\nabc,1,2\ndef,0,3\n,,4\n")
    assert file.read_commits() == {"abc": True, "def": False, "": False}
    assert file.format_commits() == "abc with changes, def, unknown"
    (tmp_path / "a.csv").write_text("commit,ms\nabc,1\n")
    assert file.read_commits() == {"abc": False}
    (tmp_path / "a.csv").write_text("ms\n1\n")
    assert file.read_commits() == {"": False}
