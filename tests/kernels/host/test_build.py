"""What the compiled extension is found by."""

import shutil

import pytest
from fusednorm.host import build


@pytest.mark.parametrize("name", [path.name for path in sorted(build.FOLDER.iterdir())])
def test_a_change_to_any_source_is_another_extension(name, tmp_path, monkeypatch):
    before = build.key()
    copied = tmp_path / "extension"
    shutil.copytree(build.FOLDER, copied)
    monkeypatch.setattr(build, "FOLDER", copied)
    assert build.key() == before
    (copied / name).write_text((copied / name).read_text() + "// changed\n")
    assert build.key() != before


def test_sources_moved_between_files_are_another_extension(tmp_path, monkeypatch):
    before = build.key()
    copied = tmp_path / "extension"
    shutil.copytree(build.FOLDER, copied)
    (copied / "call.h").rename(copied / "calls.h")
    monkeypatch.setattr(build, "FOLDER", copied)
    assert build.key() != before
