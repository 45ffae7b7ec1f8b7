import sys
from types import ModuleType

from benchmarks.providers.registry import (
    DISTRIBUTIONS,
    PROVIDERS,
    REQUIRED_MODULES,
    filter_importable,
    find_version,
)


def test_what_cannot_be_imported_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    assert filter_importable(PROVIDERS) == ["fusednorm", "torch", "compile", "tutorial"]
    assert "liger is left out" in capsys.readouterr().err


def test_a_package_that_fails_in_its_own_way_is_left_out(monkeypatch, tmp_path, capsys):
    (tmp_path / "quack.py").write_text("raise OSError('libcute.so is missing')")
    monkeypatch.delitem(sys.modules, "quack", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert not filter_importable(["quack"])
    assert "libcute.so is missing" in capsys.readouterr().err


def test_what_can_be_imported_takes_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    assert filter_importable(["quack", "torch"]) == ["quack", "torch"]


def test_versions_are_those_of_installed_peers(monkeypatch, tmp_path):
    (tmp_path / "quack_kernels-7.8.dist-info").mkdir()
    (tmp_path / "quack_kernels-7.8.dist-info" / "METADATA").write_text("Name: quack-kernels\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [find_version(name) for name in ("quack", "helion", "torch", "copy")] == ["7.8", "", "", ""]
    assert DISTRIBUTIONS.keys() == REQUIRED_MODULES.keys()
