"""The registered layers of a server with several processes, on disk: the state common to all processes."""

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from normserve.errors import StorageError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The state of one layer after its last change: its parameters, or that it was removed.

    Attributes:
        change_id: identifies the change.
        query: the query of the registration; None for a removal.
        body: its parameters as safetensors.
    """

    name: str
    change_id: str
    query: bytes | None
    body: memoryview


class LayerJournal:
    """The registered layers on disk: one file for each layer, and a staging file for the change in preparation.

    The process that writes holds the fleet's lock.  All work is done on the journal's own thread; every
    failure of the disk is a `StorageError`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "layers"
        self._staged_path = folder / "staged"
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def stage(
        self, name: str, change_id: str, query: bytes | None, body: Iterable[bytes | memoryview]
    ) -> None:
        """Write a change of a layer to the staging file.  The change has no effect before `commit_staged`.

        Raises:
            StorageError: it could not be written; no file is left.
        """
        query_text = None if query is None else query.decode("latin-1")
        head = json.dumps({"name": name, "change": change_id, "query": query_text}).encode() + b"\n"
        await self._run_on_thread(lambda: self._write_staged([head, *body]))

    async def read_staged(self) -> JournalEntry | None:
        """Read the staged change."""
        return await self._run_on_thread(lambda: _read_entry(self._staged_path))

    async def commit_staged(self, name: str) -> None:
        """Replace the layer's entry by the staged one."""
        await self._run_on_thread(lambda: self._staged_path.rename(self._get_entry_path(name)))

    async def discard_staged(self) -> None:
        """Delete the staged change."""
        await self._run_on_thread(lambda: self._staged_path.unlink(missing_ok=True))

    async def remove(self, name: str) -> None:
        """Delete a layer's entry."""
        await self._run_on_thread(lambda: self._get_entry_path(name).unlink(missing_ok=True))

    async def read_entry(self, name: str) -> JournalEntry | None:
        """Read a layer's entry; None if there is none."""
        return await self._run_on_thread(lambda: _read_entry(self._get_entry_path(name)))

    async def read_change_id(self, name: str) -> str | None:
        """Read the id of a layer's last change; None without an entry."""
        return await self._run_on_thread(lambda: _read_change_id(self._get_entry_path(name)))

    async def list_entry_files(self) -> list[Path]:
        """List the files of all entries, for `read_entry_file`."""
        return await self._run_on_thread(lambda: sorted(self._folder.glob("*.layer")))

    async def read_entry_file(self, file: Path) -> JournalEntry:
        """Read the entry in one of the files that `list_entry_files` lists."""
        entry = await self._run_on_thread(lambda: _read_entry(file))
        assert entry is not None
        return entry

    def _get_entry_path(self, name: str) -> Path:
        """Return the path of a layer's entry, which is unique for each name even on case-insensitive file
        systems.
        """
        return self._folder / (base64.b32encode(name.encode()).decode().rstrip("=").lower() + ".layer")

    def _write_staged(self, pieces: list[bytes | memoryview]) -> None:
        """Write the staging file; delete it if that fails."""
        self._folder.mkdir(exist_ok=True)
        try:
            with self._staged_path.open("wb") as file:
                file.writelines(pieces)
        except OSError:
            with contextlib.suppress(OSError):
                self._staged_path.unlink(missing_ok=True)
            raise

    async def _run_on_thread(self, work: Callable[[], _T]) -> _T:
        """Run a function on the journal's thread, and return its result.

        Raises:
            StorageError: the function failed with an OSError.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except OSError as error:
            raise StorageError(f"the registered layers could not be written to disk: {error.strerror}") from error


def _read_entry(file: Path) -> JournalEntry | None:
    """Read a layer's entry from its file; None if there is no such file."""
    try:
        head, _, body = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    head_fields = json.loads(head)
    query = None if head_fields["query"] is None else head_fields["query"].encode("latin-1")
    # Writable, as torch wants memory to be.
    return JournalEntry(head_fields["name"], head_fields["change"], query, memoryview(bytearray(body)))


def _read_change_id(file: Path) -> str | None:
    """Read only the change id of the entry in a file; None if there is no such file."""
    try:
        with file.open("rb") as opened:
            change: str = json.loads(opened.readline())["change"]
    except FileNotFoundError:
        return None
    return change
