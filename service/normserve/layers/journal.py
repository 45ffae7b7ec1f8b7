"""The registered layers of a server with several processes, on disk: the state that every process must have."""

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
    """What one change made of a layer.

    Attributes:
        change: names the change.
        query: what the layer was registered with; None where it was removed.
        body: its parameters as safetensors.
    """

    name: str
    change: str
    query: bytes | None
    body: memoryview


class LayerJournal:
    """One file for each layer, and one for a layer that is about to be.

    The process that writes holds the fleet's lock.  All work is done on the journal's own thread; every failure
    of the disk is a `StorageError`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "layers"
        self._staged = folder / "staged"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def stage(self, name: str, change: str, query: bytes | None, body: Iterable[bytes | memoryview]) -> None:
        """Write what a change is to make of a layer; no process's layers are changed by that.

        Raises:
            StorageError: it could not be written; nothing is left of it.
        """
        said = None if query is None else query.decode("latin-1")
        head = json.dumps({"name": name, "change": change, "query": said}).encode() + b"\n"
        await self._do(lambda: self._write([head, *body]))

    async def staged(self) -> JournalEntry | None:
        """What is about to be."""
        return await self._do(lambda: _read_entry(self._staged))

    async def commit(self, name: str) -> None:
        """What is staged is what holds, from now on."""
        await self._do(lambda: self._staged.rename(self._file(name)))

    async def discard(self) -> None:
        """Forget what is staged."""
        await self._do(lambda: self._staged.unlink(missing_ok=True))

    async def remove(self, name: str) -> None:
        """There is no such layer any more."""
        await self._do(lambda: self._file(name).unlink(missing_ok=True))

    async def read(self, name: str) -> JournalEntry | None:
        """What holds of a layer; None where nothing was written of it."""
        return await self._do(lambda: _read_entry(self._file(name)))

    async def change_of(self, name: str) -> str | None:
        """By which change a layer is what it is; None where nothing was written of it."""
        return await self._do(lambda: _read_change_id(self._file(name)))

    async def entries(self) -> list[Path]:
        """The files of everything that holds, for `load`."""
        return await self._do(lambda: sorted(self._folder.glob("*.layer")))

    async def load(self, file: Path) -> JournalEntry:
        """What one of `entries` says."""
        entry = await self._do(lambda: _read_entry(file))
        assert entry is not None
        return entry

    def _file(self, name: str) -> Path:
        """Where a layer's entry is: another for each name, on file systems that take A for a as well."""
        return self._folder / (base64.b32encode(name.encode()).decode().rstrip("=").lower() + ".layer")

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        self._folder.mkdir(exist_ok=True)
        try:
            with self._staged.open("wb") as file:
                file.writelines(pieces)
        except OSError:
            with contextlib.suppress(OSError):
                self._staged.unlink(missing_ok=True)
            raise

    async def _do(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StorageError(f"the registered layers could not be written to disk: {error.strerror}") from error


def _read_entry(file: Path) -> JournalEntry | None:
    try:
        head, _, body = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    said = json.loads(head)
    query = None if said["query"] is None else said["query"].encode("latin-1")
    # Writable, as torch wants memory to be.
    return JournalEntry(said["name"], said["change"], query, memoryview(bytearray(body)))


def _read_change_id(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            change: str = json.loads(opened.readline())["change"]
    except FileNotFoundError:
        return None
    return change
