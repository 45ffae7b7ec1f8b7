"""What stands in the journal, also when the disk is full."""

import asyncio
import contextlib
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.errors import StorageError
from normserve.layers.journal import LayerJournal
from normserve.layers.registry import is_layer_name

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True).filter(is_layer_name)


def files(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def put(journal: LayerJournal, name: str, change: str = "c", body: bytes = b"body") -> None:
    await journal.stage(name, change, b"op=rms_norm", [body])
    await journal.commit_staged(name)


@contextlib.contextmanager
def no_space():
    """Files may have 4096 bytes, and no more; among them that to which pytest writes, if its output is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_committed_is_read(tmp_path):
    async def play() -> None:
        journal = LayerJournal(tmp_path)
        assert await journal.read_entry("a") is None
        assert await journal.read_change_id("a") is None
        await journal.stage("a", "first", b"op=rms_norm&eps=0.5", [b"bo", memoryview(b"dy")])
        assert await journal.read_entry("a") is None
        assert (await journal.read_staged()).change_id == "first"
        await journal.commit_staged("a")
        assert await journal.read_staged() is None
        entry = await journal.read_entry("a")
        assert (entry.name, entry.query, bytes(entry.body)) == ("a", b"op=rms_norm&eps=0.5", b"body")
        assert await journal.read_change_id("a") == "first"
        assert not entry.body.readonly

    asyncio.run(play())


def test_it_holds_what_is_registered_and_nothing_else(tmp_path):
    async def play() -> None:
        journal = LayerJournal(tmp_path)
        for index in range(5):
            await put(journal, "a", str(index), b"x" * 1000)
        await journal.stage("b", "c", b"", [b"x" * 1000])
        await journal.discard_staged()
        await put(journal, "c")
        await journal.remove("c")
        await journal.stage("of the checkpoint", "c", None, [])
        await journal.commit_staged("of the checkpoint")
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1300
        assert len(files(tmp_path)) == 2

    asyncio.run(play())


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    async def play() -> None:
        journal = LayerJournal(tmp_path)
        await put(journal, "a", "first")
        before = files(tmp_path)
        with no_space(), pytest.raises(StorageError, match="too large"):
            await journal.stage("a", "second", b"", [b"x" * 5000])
        assert files(tmp_path) == before
        assert await journal.read_change_id("a") == "first"
        await put(journal, "a", "third")

    asyncio.run(play())


def test_a_folder_that_is_gone_is_an_error_of_the_storage(tmp_path):
    journal = LayerJournal(tmp_path / "gone")
    with pytest.raises(StorageError):
        asyncio.run(journal.stage("a", "c", b"", []))


@given(names=st.sets(NAMES, min_size=2, max_size=8))
def test_each_name_has_a_file_of_its_own_on_every_file_system(tmp_path, names):
    journal = LayerJournal(tmp_path)
    paths = [journal._get_entry_path(name) for name in names]
    assert len({path.name.lower() for path in paths}) == len(names)
    assert all(path.parent == tmp_path / "layers" and len(path.name) < 255 for path in paths)


@pytest.mark.parametrize(
    "names", [("a", "A"), ("..a", "a"), ("-", "_"), ("x" * 128, "X" * 128), (".layer", "a.layer")]
)
def test_names_that_a_file_system_may_confuse(tmp_path, names):
    async def play() -> None:
        journal = LayerJournal(tmp_path)
        for name in names:
            await put(journal, name, change=name)
        entries = [await journal.read_entry_file(file) for file in await journal.list_entry_files()]
        assert {entry.name for entry in entries} == set(names)
        assert [await journal.read_change_id(name) for name in names] == list(names)

    asyncio.run(play())
    assert [path.name for path in tmp_path.iterdir()] == ["layers"]
