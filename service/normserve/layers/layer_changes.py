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
from normserve.peers.sibling_processes import Question, SiblingConnection, SiblingProcesses, SiblingResponseError

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Makes a layer from its name, the query of its registration, and its parameters as safetensors.
MakeLayer = Callable[[str, bytes, memoryview], Awaitable[RegisteredLayer]]

# Longest wait of a change for earlier ones.
_TURN_S = 10.0
# A layer's kernels may have to be compiled before it is registered.
_PREPARE_S = 30.0
# The layer is already made: a process only has to register it.
_APPLY_S = 5.0
_READS, _READ_PAUSE_S = 100, 0.1


class LayerChanges:
    """Registration and removal of layers in this process alone.

    The subclass `FleetLayerChanges` changes the other processes of a server as well.
    """

    def __init__(self, layers: LayerRegistry, siblings: SiblingProcesses, make: MakeLayer) -> None:
        self._registry = layers
        self._siblings = siblings
        self._make_layer = make

    async def register_or_replace(self, name: str, query: bytes, body: memoryview) -> tuple[RegisteredLayer, bool]:
        """Make a layer of the request's query and body, and register it; return it, and whether it replaced one.

        Raises:
            NormserveError: the layer is invalid, or layers cannot be changed now; nothing has changed.
        """
        self._siblings.require_changeable_layers()
        layer = await self._make_layer(name, query, body)
        return layer, self._registry.put_or_replace(layer)

    async def remove(self, name: str) -> None:
        """Remove a layer from this process.  Raise an error if this kind of process does not allow changes of
        layers.

        Raises:
            UnknownLayerError: there is none of that name.
            NormserveError: layers cannot be changed now; nothing has changed.
        """
        self._siblings.require_changeable_layers()
        self._registry.remove(name)

    async def synchronise(self) -> None:
        """Load the layers of the other processes; without siblings there are none."""


class FleetLayerChanges(LayerChanges):
    """Registration and removal of layers in all processes of a server (its fleet).  Only one change is made at a
    time.

    The journal defines the layers.  A change writes its layer beside the journal, has every sibling
    make the layer as well, and only then moves it into the journal: from then on it is in effect, and
    each process registers the layer that it has made.  An error before that leaves everything
    unchanged.  A sibling also reads the journal when the connection of a change ends: so it learns the
    outcome of a change whose process died, or during which it was stopped itself.  A process that
    starts reads the whole journal under the lock.
    """

    def __init__(self, layers: LayerRegistry, siblings: SiblingProcesses, make: MakeLayer, folder: Path) -> None:
        super().__init__(layers, siblings, make)
        self._journal = LayerJournal(folder)
        self._lock = ProcessLock(folder)
        self._running_changes: set[asyncio.Task[Any]] = set()
        self._checkpoint_names: frozenset[str] = frozenset()
        # The id of the last change of each layer that has an entry in the journal.
        self._change_ids: dict[str, str] = {}
        # The layer that a sibling is about to register, and the id of its change.
        self._prepared_layer: tuple[str, RegisteredLayer] | None = None
        self._apply_lock = asyncio.Lock()
        self._is_synchronised = False
        self.on_divergence: Callable[[], None] = lambda: None
        siblings.handlers |= {"prepare": self._handle_prepare, "apply": self._handle_apply}

    async def register_or_replace(self, name: str, query: bytes, body: memoryview) -> tuple[RegisteredLayer, bool]:
        return await self._run_to_completion(self._register_or_replace_in_fleet(name, query, body))

    async def remove(self, name: str) -> None:
        await self._run_to_completion(self._remove_in_fleet(name))

    async def synchronise(self) -> None:
        """Load all layers of the journal at the start of this process; its siblings send it all later changes."""
        self._checkpoint_names = frozenset(self._registry)
        async with self._lock.hold(None):
            for file in await self._journal.list_entry_files():
                entry = await self._journal.read_entry_file(file)
                if entry.query is not None:
                    self._registry.put_or_replace(await self._make_layer(entry.name, entry.query, entry.body))
                elif entry.name in self._registry:
                    self._registry.remove(entry.name)
                self._change_ids[entry.name] = entry.change_id
            # From now on this process receives every change of a layer.
            self._is_synchronised = True

    async def _register_or_replace_in_fleet(
        self, name: str, query: bytes, body: memoryview
    ) -> tuple[RegisteredLayer, bool]:
        """Register a layer in all processes: each sibling makes the layer, the journal records it, then all
        register it.

        An error before the journal has the layer leaves all processes unchanged.  Return the layer, and
        whether it replaced one.
        """
        async with self._hold_fleet_lock(), self._connect_all_siblings(name) as links:
            layer = await self._make_layer_within_limits(name, query, body)
            change = secrets.token_hex(8)
            # Without other content of the client's header: the journal is as large as the layers are.
            async with self._stage_change(name, change, query, safetensors.encode(safetensors.decode(body))):
                await self._request_all(links, {"do": "prepare", "name": name, "change": change}, _PREPARE_S)
                await self._journal.commit_staged(name)
            self._change_ids[name] = change
            replaced = self._registry.put_or_replace(layer)
            await self._request_apply(links, name)
        return layer, replaced

    async def _remove_in_fleet(self, name: str) -> None:
        """Remove a layer from all processes: each sibling agrees, the journal records it, then all remove the
        layer.

        For a layer of the checkpoint, the journal gets an entry of the removal: each process that starts
        loads the checkpoint first.
        """
        async with self._hold_fleet_lock(), self._connect_all_siblings(name) as links:
            self._registry.get(name)
            await self._request_all(links, {"do": "prepare", "name": name, "change": ""}, _PREPARE_S)
            if name in self._checkpoint_names:
                change = secrets.token_hex(8)
                async with self._stage_change(name, change, None, ()):
                    await self._journal.commit_staged(name)
                self._change_ids[name] = change
            else:
                await self._journal.remove(name)
                self._change_ids.pop(name, None)
            self._registry.remove(name)
            await self._request_apply(links, name)

    async def _run_to_completion(self, change: Coroutine[Any, Any, _T]) -> _T:
        """Run a change in a task of its own, so that it ends even if the client disconnects."""
        task = asyncio.get_running_loop().create_task(change)
        self._running_changes.add(task)
        task.add_done_callback(self._discard_task)
        return await asyncio.shield(task)

    def _discard_task(self, task: asyncio.Task[Any]) -> None:
        """Forget a change that has ended, and mark its exception as retrieved: the client may have disconnected."""
        self._running_changes.discard(task)
        if not task.cancelled():
            # The client may have left.
            task.exception()

    @contextlib.asynccontextmanager
    async def _hold_fleet_lock(self) -> AsyncIterator[None]:
        """Hold the lock between processes during the block, so that no other process changes layers.

        Raises:
            ChangeFailedError: other processes held it all the time.
            StorageError: the lock's files cannot be opened.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._lock.hold(_TURN_S))
            except TimeoutError:
                raise ChangeFailedError(f"other layers were being changed for {_TURN_S:g} s") from None
            except OSError as error:
                raise StorageError(f"the lock of the layers cannot be opened: {error.strerror}") from error
            yield

    @contextlib.asynccontextmanager
    async def _connect_all_siblings(self, name: str) -> AsyncIterator[list[SiblingConnection]]:
        """Connect to all sibling processes for the block: each of them must agree to a change.

        Raises:
            ChangeFailedError: a sibling cannot be reached.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                links = await stack.enter_async_context(self._siblings.connect_all_listening())
            except OSError as error:
                raise ChangeFailedError(f"the other processes cannot be reached: {error.strerror}") from error
            yield links

    @contextlib.asynccontextmanager
    async def _stage_change(
        self, name: str, change_id: str, query: bytes | None, body: Sequence[bytes | memoryview]
    ) -> AsyncIterator[None]:
        """Write a change to the journal's staging file; delete the file if the block fails."""
        await self._journal.stage(name, change_id, query, body)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                await self._journal.discard_staged()
            raise

    async def _request_all(self, links: list[SiblingConnection], question: Question, timeout_s: float) -> None:
        """Send a request to all siblings, and wait until each has confirmed it.

        Those that have ended are removed from `links`: they read the journal when they start.

        Raises:
            ChangeFailedError: one refuses, or does not answer.
        """

        async def request(link: SiblingConnection) -> str | None:
            try:
                await link.send_request(question, timeout_s)
            except ConnectionError:
                links.remove(link)
            except SiblingResponseError as error:
                return f"process {link.index} could not take it: {error}"
            except TimeoutError:
                return f"process {link.index} does not answer"
            return None

        faults = [fault for fault in await asyncio.gather(*map(request, tuple(links))) if fault is not None]
        if faults:
            raise ChangeFailedError(f"no process has changed the layer, because {faults[0]}")

    async def _request_apply(self, links: list[SiblingConnection], name: str) -> None:
        """Ask all siblings to apply the change that the journal has; log a warning if one does not confirm in time.

        Such a sibling applies the change when it reads the journal at the end of the connection.
        """
        try:
            await self._request_all(links, {"do": "apply", "name": name}, _APPLY_S)
        except ChangeFailedError as error:
            log.warning("a change of a layer is in effect, but not yet in every process: %s", error.detail)

    async def _make_layer_within_limits(self, name: str, query: bytes, body: memoryview) -> RegisteredLayer:
        """Make a layer within a time limit, and check that the registry has room for it.

        Without the limit, requests could wait for a device that hangs.

        Raises:
            NormserveError: it cannot.
        """
        try:
            async with asyncio.timeout(_PREPARE_S):
                layer = await self._make_layer(name, query, body)
        except TimeoutError:
            raise ChangeFailedError(f"the device has not taken the layer in {_PREPARE_S:g} s") from None
        self._registry.require_capacity(layer.name, layer.nbytes)
        return layer

    async def _handle_prepare(self, question: Question, at_end: contextlib.AsyncExitStack) -> bytes:
        """Make the layer that a sibling has staged, so that only its registration remains to be done.

        When the connection ends, bring the layer to the state that the journal then has.
        """
        if not self._is_synchronised:
            return b""
        name, change = question["name"], question["change"]
        at_end.push_async_callback(self._catch_up_with_journal, name, change)
        if not change:
            return b""
        async with self._apply_lock:
            entry = await self._journal.read_staged()
            if entry is None or entry.change_id != change or entry.query is None:
                raise ChangeFailedError("the change was abandoned meanwhile")
            self._prepared_layer = change, await self._make_layer_within_limits(name, entry.query, entry.body)
        return b""

    async def _handle_apply(self, question: Question, at_end: contextlib.AsyncExitStack) -> bytes:
        if self._is_synchronised:
            await self._catch_up_with_journal(question["name"])
        return b""

    async def _catch_up_with_journal(self, name: str, ended_change_id: str | None = None) -> None:
        """Change a layer in this process to its state in the journal.

        Also drop the layer that was made for the change `ended_change_id`.  After an error, this process must start
        again, and `on_divergence` is called.
        """
        try:
            async with self._apply_lock:
                while (change := await self._read_change_id_with_retries(name)) != self._change_ids.get(name):
                    await self._apply_change(name, change)
                if self._prepared_layer is not None and self._prepared_layer[0] == ended_change_id:
                    self._prepared_layer = None
        except Exception:
            log.critical("this process cannot follow a change of a layer, and must start again", exc_info=True)
            self.on_divergence()

    async def _read_change_id_with_retries(self, name: str) -> str | None:
        """Read the id of a layer's last change from the journal; None if the layer has no entry.

        Errors are retried for some seconds, as file descriptors may be exhausted.
        """
        for _ in range(_READS):
            with contextlib.suppress(StorageError):
                return await self._journal.read_change_id(name)
            await asyncio.sleep(_READ_PAUSE_S)
        return await self._journal.read_change_id(name)

    async def _apply_change(self, name: str, change_id: str | None) -> None:
        """Register or remove a layer in this process, according to the journal's entry of this change.

        None as `change_id` removes the layer, as it has no entry.  If the entry has changed again meanwhile,
        do nothing.
        """
        layer = None
        if change_id is not None and self._prepared_layer is not None and self._prepared_layer[0] == change_id:
            layer = self._prepared_layer[1]
        elif change_id is not None:
            entry = await self._journal.read_entry(name)
            if entry is None or entry.change_id != change_id:
                return
            if entry.query is not None:
                layer = await self._make_layer_within_limits(name, entry.query, entry.body)
        if layer is not None:
            self._registry.put_or_replace(layer)
        elif name in self._registry:
            self._registry.remove(name)
        if change_id is None:
            self._change_ids.pop(name, None)
        else:
            self._change_ids[name] = change_id
