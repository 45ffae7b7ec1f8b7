"""Registration and removal of layers, in every process of a server or in none."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from normserve.codec import safetensors
from normserve.errors import ChangeFailedError, StorageError
from normserve.jobs.job import RegisteredLayer
from normserve.layers.journal import LayerJournal
from normserve.layers.process_lock import ProcessLock
from normserve.layers.registry import LayerRegistry
from normserve.peers.siblings import Question, SiblingConnection, SiblingProcesses, SiblingRefusedError

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Makes a layer of its name, the query that it was registered with, and its parameters as safetensors.
MakeLayer = Callable[[str, bytes, memoryview], Awaitable[RegisteredLayer]]

# A change waits so long for those before it.
_TURN_S = 10.0
# A layer's kernels may have to be compiled before it is registered.
_PREPARE_S = 30.0
# There is nothing left to do but to note it.
_APPLY_S = 5.0
_READS, _READ_AGAIN_S = 100, 0.1


class LayerChanges:
    """Changes the layers of a process that has no siblings."""

    def __init__(self, layers: LayerRegistry, siblings: SiblingProcesses, make: MakeLayer) -> None:
        self._layers = layers
        self._siblings = siblings
        self._make = make

    async def register(self, name: str, query: bytes, body: memoryview) -> tuple[RegisteredLayer, bool]:
        """Make and register a layer; with it, whether it replaced one.

        Raises:
            NormserveError: by what is wrong with it, or with the moment; nothing has changed.
        """
        self._siblings.require_changeable()
        layer = await self._make(name, query, body)
        return layer, self._layers.put(layer)

    async def remove(self, name: str) -> None:
        """Forget a layer.

        Raises:
            UnknownLayerError: there is none of that name.
            NormserveError: the moment is wrong; nothing has changed.
        """
        self._siblings.require_changeable()
        self._layers.remove(name)

    async def join(self) -> None:
        """Have the layers that the others have."""


class FleetLayerChanges(LayerChanges):
    """Changes the layers of all processes of a fleet, one change at a time.

    The journal says what the layers are.  A change writes its layer beside the journal, has every sibling make it
    as well, and only then moves it into the journal: from then on it holds, and each process registers what it has
    made.  What goes wrong before leaves everything as it was.  A sibling also reads the journal when the connection
    ends over which it was told, and so learns what became of a change whose process died, or during which it was
    stopped itself; one that starts reads all of it under the lock.
    """

    def __init__(self, layers: LayerRegistry, siblings: SiblingProcesses, make: MakeLayer, folder: Path) -> None:
        super().__init__(layers, siblings, make)
        self._journal = LayerJournal(folder)
        self._lock = ProcessLock(folder)
        self._going: set[asyncio.Task[Any]] = set()
        self._of_checkpoint: frozenset[str] = frozenset()
        # By which change each layer is what it is, of those that the journal knows.
        self._changes: dict[str, str] = {}
        # What a sibling is about to register, by its change.
        self._prepared: tuple[str, RegisteredLayer] | None = None
        self._applying = asyncio.Lock()
        self._has_joined = False
        self.on_divergence: Callable[[], None] = lambda: None
        siblings.handlers |= {"prepare": self._prepare, "apply": self._apply}

    async def register(self, name: str, query: bytes, body: memoryview) -> tuple[RegisteredLayer, bool]:
        return await self._to_its_end(self._register(name, query, body))

    async def remove(self, name: str) -> None:
        await self._to_its_end(self._remove(name))

    async def join(self) -> None:
        self._of_checkpoint = frozenset(layer.name for layer in self._layers.all())
        async with self._lock.held(None):
            for file in await self._journal.entries():
                entry = await self._journal.load(file)
                if entry.query is not None:
                    self._layers.put(await self._make(entry.name, entry.query, entry.body))
                elif entry.name in self._layers:
                    self._layers.remove(entry.name)
                self._changes[entry.name] = entry.change
            # From now on this process receives every change of a layer.
            self._has_joined = True

    async def _register(self, name: str, query: bytes, body: memoryview) -> tuple[RegisteredLayer, bool]:
        async with self._turn(), self._agreed(name) as links:
            layer = await self._made(name, query, body)
            change = secrets.token_hex(8)
            # Without what else the client's header said: the journal is as large as the layers are.
            async with self._staged(name, change, query, safetensors.encode(safetensors.decode(body))):
                await self._ask_all(links, {"do": "prepare", "name": name, "change": change}, _PREPARE_S)
                await self._journal.commit(name)
            self._changes[name] = change
            replaced = self._layers.put(layer)
            await self._have_applied(links, name)
        return layer, replaced

    async def _remove(self, name: str) -> None:
        async with self._turn(), self._agreed(name) as links:
            self._layers.get(name)
            await self._ask_all(links, {"do": "prepare", "name": name, "change": ""}, _PREPARE_S)
            if name in self._of_checkpoint:
                change = secrets.token_hex(8)
                async with self._staged(name, change, None, ()):
                    await self._journal.commit(name)
                self._changes[name] = change
            else:
                await self._journal.remove(name)
                self._changes.pop(name, None)
            self._layers.remove(name)
            await self._have_applied(links, name)

    async def _to_its_end(self, change: Coroutine[Any, Any, _T]) -> _T:
        """What has begun is finished even if the client leaves."""
        task = asyncio.get_running_loop().create_task(change)
        self._going.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._going.discard(task)
        if not task.cancelled():
            # The client may have left.
            task.exception()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """No other process changes layers meanwhile.

        Raises:
            ChangeFailedError: others did all the time.
            StorageError: the lock cannot be had.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._lock.held(_TURN_S))
            except TimeoutError:
                raise ChangeFailedError(f"other layers were being changed for {_TURN_S:g} s") from None
            except OSError as error:
                raise StorageError(f"the lock of the layers cannot be opened: {error.strerror}") from error
            yield

    @contextlib.asynccontextmanager
    async def _agreed(self, name: str) -> AsyncIterator[list[SiblingConnection]]:
        """Connections to those that have to agree."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                links = await stack.enter_async_context(self._siblings.linked())
            except OSError as error:
                raise ChangeFailedError(f"the other processes cannot be reached: {error.strerror}") from error
            yield links

    @contextlib.asynccontextmanager
    async def _staged(
        self, name: str, change: str, query: bytes | None, body: Sequence[bytes | memoryview]
    ) -> AsyncIterator[None]:
        """Written beside the journal; gone again if what is to be done with it fails."""
        await self._journal.stage(name, change, query, body)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                await self._journal.discard()
            raise

    async def _ask_all(self, links: list[SiblingConnection], question: Question, timeout_s: float) -> None:
        """Ask all who are there, and go on without those that are gone: they read the journal when they start.

        Raises:
            ChangeFailedError: one cannot, or does not answer.
        """

        async def request(link: SiblingConnection) -> str | None:
            try:
                await link.request(question, timeout_s)
            except ConnectionError:
                links.remove(link)
            except SiblingRefusedError as error:
                return f"process {link.index} could not take it: {error}"
            except TimeoutError:
                return f"process {link.index} does not answer"
            return None

        faults = [fault for fault in await asyncio.gather(*map(request, tuple(links))) if fault is not None]
        if faults:
            raise ChangeFailedError(f"no process has changed the layer, because {faults[0]}")

    async def _have_applied(self, links: list[SiblingConnection], name: str) -> None:
        """Have all processes register what they made; those that do not confirm now do so as soon as they can."""
        try:
            await self._ask_all(links, {"do": "apply", "name": name}, _APPLY_S)
        except ChangeFailedError as error:
            log.warning("a change of a layer is in effect, but not yet in every process: %s", error.detail)

    async def _made(self, name: str, query: bytes, body: memoryview) -> RegisteredLayer:
        """A layer that can be registered: within a time, so that no request waits for a device that hangs.

        Raises:
            NormserveError: it cannot.
        """
        try:
            async with asyncio.timeout(_PREPARE_S):
                layer = await self._make(name, query, body)
        except TimeoutError:
            raise ChangeFailedError(f"the device has not taken the layer in {_PREPARE_S:g} s") from None
        self._layers.require_room(layer.name, layer.nbytes)
        return layer

    async def _prepare(self, question: Question, at_end: contextlib.AsyncExitStack) -> bytes:
        """Make what a sibling is about to register; when it is gone, see what became of it."""
        if not self._has_joined:
            return b""
        name, change = question["name"], question["change"]
        at_end.push_async_callback(self._follow, name, change)
        if not change:
            return b""
        async with self._applying:
            entry = await self._journal.staged()
            if entry is None or entry.change != change or entry.query is None:
                raise ChangeFailedError("the change was abandoned meanwhile")
            self._prepared = change, await self._made(name, entry.query, entry.body)
        return b""

    async def _apply(self, question: Question, at_end: contextlib.AsyncExitStack) -> bytes:
        if self._has_joined:
            await self._follow(question["name"])
        return b""

    async def _follow(self, name: str, ended: str | None = None) -> None:
        """Make a layer what the journal says; after a change that has ended, what was made for it may go."""
        try:
            async with self._applying:
                while (change := await self._change_of(name)) != self._changes.get(name):
                    await self._take_over(name, change)
                if self._prepared is not None and self._prepared[0] == ended:
                    self._prepared = None
        except Exception:
            log.critical("this process cannot follow a change of a layer, and must start again", exc_info=True)
            self.on_divergence()

    async def _change_of(self, name: str) -> str | None:
        """By which change a layer is what it is; descriptors may be exhausted for a while."""
        for _ in range(_READS):
            with contextlib.suppress(StorageError):
                return await self._journal.change_of(name)
            await asyncio.sleep(_READ_AGAIN_S)
        return await self._journal.change_of(name)

    async def _take_over(self, name: str, change: str | None) -> None:
        layer = None
        if change is not None and self._prepared is not None and self._prepared[0] == change:
            layer = self._prepared[1]
        elif change is not None:
            entry = await self._journal.read(name)
            if entry is None or entry.change != change:
                return
            if entry.query is not None:
                layer = await self._made(name, entry.query, entry.body)
        if layer is not None:
            self._layers.put(layer)
        elif name in self._layers:
            self._layers.remove(name)
        if change is None:
            self._changes.pop(name, None)
        else:
            self._changes[name] = change
