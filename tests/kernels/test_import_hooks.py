"""Calls after the import of another module."""

import importlib
import importlib.util
import sys

import pytest
from fusednorm.import_hooks import call_after_import


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """A module `later` that can be imported; afterwards everything is as before."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "later", raising=False)
    path = tmp_path / "later.py"
    path.write_text("value = 1\n")
    return path


def test_a_module_that_is_there_is_not_waited_for():
    finders = list(sys.meta_path)
    calls = []
    call_after_import("sys", lambda: calls.append("called"))
    assert calls == ["called"]
    assert sys.meta_path == finders


def test_the_call_follows_the_import(importable):
    finders = list(sys.meta_path)
    seen = []
    call_after_import("later", lambda: seen.append(sys.modules["later"].value))
    assert seen == []
    later = importlib.import_module("later")
    assert seen == [1]
    assert sys.meta_path == finders
    assert importlib.util.find_spec("later").origin == str(importable)
    assert type(later.__loader__) is type(importlib.util.find_spec("json").loader)


def test_a_search_alone_is_no_import(importable):
    calls = []
    call_after_import("later", lambda: calls.append("called"))
    assert importlib.util.find_spec("later").origin == str(importable)
    assert calls == []
    importlib.import_module("later")
    assert calls == ["called"]


def test_after_a_failed_import_the_next_one_counts(importable):
    importable.write_text("raise RuntimeError('not yet')\n")
    calls = []
    call_after_import("later", lambda: calls.append("called"))
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("later")
    assert calls == []
    importable.write_text("value = 'another length, which tells the bytecode from that of before'\n")
    importlib.import_module("later")
    assert calls == ["called"]


def test_a_module_that_is_not_installed_is_as_missing_as_before(importable):
    importable.unlink()
    call_after_import("later", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'later'"):
        importlib.import_module("later")


def test_several_wait_for_one_module(importable):
    calls = []
    call_after_import("later", lambda: calls.append("first"))
    call_after_import("later", lambda: calls.append("second"))
    importlib.import_module("later")
    assert sorted(calls) == ["first", "second"]


def test_finders_that_python_passes_over_are_passed_over(importable):
    sys.meta_path.insert(0, object())
    calls = []
    call_after_import("later", lambda: calls.append("called"))
    importlib.import_module("later")
    assert calls == ["called"]


def test_a_loader_of_several_modules_is_that_of_one(importable, monkeypatch):
    """The modules that a module imports are not yet that module."""

    class SharedLoader:
        def find_spec(self, name, path, target=None):
            return importlib.util.spec_from_loader(name, self) if name in ("later", "later_part") else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            if module.__name__ == "later":
                importlib.import_module("later_part")
                module.value = 1

    monkeypatch.delitem(sys.modules, "later_part", raising=False)
    sys.meta_path.insert(0, SharedLoader())
    seen = []
    call_after_import("later", lambda: seen.append(sys.modules["later"].value))
    importlib.import_module("later")
    assert seen == [1]
