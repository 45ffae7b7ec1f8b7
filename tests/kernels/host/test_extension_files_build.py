"""What the compiled extension is found by."""

import platform
import shutil
import sysconfig

import pytest
import torch
from fusednorm.host import extension_files


@pytest.mark.parametrize("name", [path.name for path in sorted(extension_files.SOURCE_FOLDER.iterdir())])
def test_a_change_to_any_source_is_another_extension(name, tmp_path, monkeypatch):
    before = extension_files.compute_build_key()
    copied = tmp_path / "extension"
    shutil.copytree(extension_files.SOURCE_FOLDER, copied)
    monkeypatch.setattr(extension_files, "SOURCE_FOLDER", copied)
    assert extension_files.compute_build_key() == before
    (copied / name).write_text((copied / name).read_text() + "// changed\n")
    assert extension_files.compute_build_key() != before


@pytest.mark.parametrize("change", ["torch", "torch's build", "Python's build", "machine"])
def test_other_versions_have_another_extension(change, monkeypatch):
    before = extension_files.compute_build_key()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "torch's build":
        monkeypatch.setattr(torch.version, "git_version", "another")
    elif change == "Python's build":
        monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": "cpython-313t-x86_64-linux-gnu"}.get)
    else:
        monkeypatch.setattr(platform, "machine", lambda: "another")
    assert extension_files.compute_build_key() != before


def test_sources_moved_between_files_are_another_extension(tmp_path, monkeypatch):
    before = extension_files.compute_build_key()
    copied = tmp_path / "extension"
    shutil.copytree(extension_files.SOURCE_FOLDER, copied)
    (copied / "replay_call.h").rename(copied / "another.h")
    monkeypatch.setattr(extension_files, "SOURCE_FOLDER", copied)
    assert extension_files.compute_build_key() != before
