"""A file of keys is read again when it changes, and only a whole one is believed."""

import asyncio
import contextlib
import logging
import os

import pytest
from normserve.admission.keys import KeysFileError, KeysFileReader
from normserve.admission.keys.keys_file import format_key_table

ONE, TWO = format_key_table("one", "1"), format_key_table("two", "2")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(ONE)
    return file


def replace(path, content):
    """Give the file this content in one step: who looks every millisecond would see one that is written in two."""
    new = path.with_suffix(".new")
    new.write_text(content)
    new.rename(path)


class Watched:
    """A file that is watched; `until` waits for what the watch does."""

    def __init__(self, file: KeysFileReader) -> None:
        self.applied: list[list[str]] = []
        self._task = asyncio.create_task(self._watch(file))

    async def _watch(self, file: KeysFileReader) -> None:
        await file.poll_changes(lambda keys: self.applied.append([key.name for key in keys]), every_s=0.001)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not self._task.done()
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def test_a_change_is_applied_once(path):
    async def run() -> list[list[str]]:
        file = KeysFileReader(path)
        file.read()
        watched = Watched(file)
        replace(path, ONE + TWO)
        await watched.until(lambda: watched.applied)
        replace(path, TWO)
        await watched.until(lambda: len(watched.applied) == 2)
        # Some looks at a file that stays as it is.
        await asyncio.sleep(0.02)
        await watched.stop()
        return watched.applied

    assert asyncio.run(run()) == [["one", "two"], ["two"]]


def test_a_broken_file_changes_nothing_and_is_told_of_once(path, caplog):
    async def run() -> list[list[str]]:
        file = KeysFileReader(path)
        file.read()
        watched = Watched(file)
        with caplog.at_level(logging.ERROR):
            for content in ("[[keys]]", None):
                path.unlink() if content is None else replace(path, content)
                before = len(caplog.records)
                await watched.until(lambda seen=before: len(caplog.records) > seen)
                await asyncio.sleep(0.02)
        replace(path, TWO)
        await watched.until(lambda: watched.applied)
        await watched.stop()
        return watched.applied

    assert asyncio.run(run()) == [["two"]]
    broken, missing = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "the old keys stay in use" in broken
    assert "keys[0]" in broken
    assert "No such file" in missing


def test_an_unforeseen_error_does_not_end_the_watch(path, monkeypatch, caplog):
    async def run() -> list[list[str]]:
        file = KeysFileReader(path)
        file.read()
        with monkeypatch.context() as patch:
            patch.setattr(KeysFileReader, "_read_if_changed", lambda self: 1 / 0)
            watched = Watched(file)
            await watched.until(lambda: caplog.records)
        replace(path, TWO)
        await watched.until(lambda: watched.applied)
        await watched.stop()
        return watched.applied

    assert asyncio.run(run()) == [["two"]]
    assert "the old keys stay in use" in caplog.text


def test_a_file_that_is_being_written_is_read_once_it_rests(path, monkeypatch):
    """A part of a file of keys may be a file of fewer keys."""
    file = KeysFileReader(path)
    file.read()
    path.write_text(TWO)
    read = KeysFileReader.read

    def read_while_it_grows(self):
        keys = read(self)
        with path.open("a") as writing:
            writing.write("\n" + ONE)
        return keys

    with monkeypatch.context() as patch:
        patch.setattr(KeysFileReader, "read", read_while_it_grows)
        assert file._read_if_changed() is None
    assert [key.name for key in file._read_if_changed()] == ["two", "one"]


@pytest.mark.parametrize("content", ["", "[[keys]]\nname = 'half", None])
def test_a_file_that_is_unusable_for_a_moment_is_no_error(path, monkeypatch, caplog, content):
    """As one is that is written in place, or that is removed before the new one is there."""
    look = KeysFileReader._read_if_changed

    def look_in_between(self):
        try:
            return look(self)
        finally:
            replace(path, TWO)

    async def run() -> list[list[str]]:
        file = KeysFileReader(path)
        file.read()
        path.unlink() if content is None else replace(path, content)
        monkeypatch.setattr(KeysFileReader, "_read_if_changed", look_in_between)
        watched = Watched(file)
        await watched.until(lambda: watched.applied)
        await watched.stop()
        return watched.applied

    assert asyncio.run(run())[0] == ["two"]
    assert "the old keys stay in use" not in caplog.text


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o602, 1)])
def test_a_file_that_everybody_can_read_is_warned_of_once(path, mode, warned, caplog):
    path.chmod(mode)
    file = KeysFileReader(path)
    file.read()
    file.read()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == warned


def test_an_endless_file_is_not_read(tmp_path):
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(KeysFileError, match="at most"):
        KeysFileReader(long).read()


def test_a_file_that_is_none_says_so(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(KeysFileError, match=str(path)):
            KeysFileReader(path).read()


def test_a_pipe_is_no_file_of_keys(tmp_path):
    os.mkfifo(tmp_path / "keys.toml")
    with pytest.raises(KeysFileError, match="not a regular file"):
        KeysFileReader(tmp_path / "keys.toml").read()
