"""Files that settings name are opened at once, or not at all."""

import os
from pathlib import Path

import pytest
from normserve.regular_files import open_regular_file


def test_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with open_regular_file(tmp_path / "file") as file:
        assert file.read() == b"content"


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular_file(tmp_path / "link") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_anything_else_is_refused_without_waiting(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular_file(tmp_path / kind)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
