"""Where the extension is looked for, and who may have written it."""

import os

import pytest
from fusednorm.host import extension_files
from fusednorm.host.extension_files import ExtensionFiles

OTHER_USER = 4321


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of a cache of its own, with something in place of the extension."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    files = ExtensionFiles()
    files.folder.mkdir(parents=True)
    files.compiled.touch(0o644)
    return files


def test_the_extension_is_found_in_tritons_cache(files, tmp_path):
    assert files.find_compiled() == files.compiled
    assert files.compiled.is_relative_to(tmp_path / "cache")
    files.compiled.unlink()
    assert files.find_compiled() is None
    assert files.try_load_compiled_module() is None


def test_a_cache_that_is_moved_later_is_not_followed(files, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    assert files.find_compiled() == files.compiled


def test_the_extension_of_an_installation_needs_no_cache(files, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(extension_files, "__file__", str(package / "extension_files.py"))
    installed = package / files.compiled.name
    installed.touch()
    for folder in (files.folder, package):
        (folder / "of-other-versions.so").touch()
    assert files.find_compiled() == installed
    files.compiled.unlink()
    assert files.find_compiled() == installed


def test_a_cache_that_may_not_be_read_has_no_extension(files, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert files.find_compiled() is None
    assert files.try_load_compiled_module() is None


@pytest.mark.parametrize("what", ["compiled", "folder", "cache"])
@pytest.mark.parametrize("how", ["of another user", "writable by everybody"])
def test_what_others_may_have_written_is_not_loaded(how, what, files, monkeypatch):
    path = {"compiled": files.compiled, "folder": files.folder, "cache": files.folder.parent}[what]
    if how == "writable by everybody":
        path.chmod(0o777)
    else:
        give_away(path, monkeypatch)
    with pytest.raises(PermissionError, match=f"expected {path} to be writable by its user alone"):
        files.try_load_compiled_module()


def give_away(path, monkeypatch):
    """Have a file or folder belong to another user, who is not root."""
    status = path.stat()
    given = os.stat_result((*status[:4], OTHER_USER, *status[5:]))
    real = type(path).stat
    monkeypatch.setattr(type(path), "stat", lambda self, **how: given if self == path else real(self, **how))


def test_root_may_have_written_it_for_everybody(files, monkeypatch):
    owner = files.folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(PermissionError):
            files.find_compiled()
    else:
        assert files.find_compiled() == files.compiled


def test_a_folder_from_which_nobody_can_remove_others_files_may_be_written_by_everybody(files):
    files.folder.parent.chmod(0o1777)
    assert files.find_compiled() == files.compiled


def test_what_is_no_extension_is_refused(files):
    with pytest.raises(ImportError):
        files.try_load_compiled_module()
