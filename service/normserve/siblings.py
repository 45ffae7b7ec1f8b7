"""The processes of one fleet, as each of them sees the others.

Every process owns a device and its own copy of the registered layers.  They reach one another by Unix domain
sockets in a folder that only this user may enter; what comes over such a socket comes from a sibling.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from normserve.exposition import merged

log = logging.getLogger(__name__)

# One that starts or hangs must not hold up a scrape for longer than Prometheus waits.
_ANSWER_S = 2.0
# A layer's kernels may have to be compiled before it is registered.
_CHANGE_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which process of a fleet this one is.

    Attributes:
        index, count: this one among all.
        device: what it owns, as `--devices` names it.
        restarts: how often one in this place has ended before it was to.
        folder: of the fleet's sockets and registered layers.
    """

    index: int
    count: int
    device: str
    restarts: int
    folder: Path

    def socket_of(self, index: int) -> Path:
        """Where the sibling of that index listens."""
        return self.folder / f"{index}.sock"


class Siblings:
    """The other processes; none where there is no fleet.

    Attributes:
        process: what this one's metrics are labelled with.
    """

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.process: str | None = None if place is None else str(place.index)

    def sent(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request comes from a sibling."""
        return self.place is not None and scope["server"][0] == str(self.place.socket_of(self.place.index))

    async def ask(self, path: str, headers: Mapping[str, str] | None = None) -> dict[int, bytes]:
        """What the others answer to a GET, by index; without those that do not."""
        answers = await self._everybody("GET", path, headers or {}, b"", _ANSWER_S)
        return {index: answer.content for index, answer in answers.items() if answer.is_success}

    async def exposition(self, scope: Mapping[str, Any], own: bytes) -> bytes:
        """The metrics' text that answers a scrape: of every process, unless it is a sibling that asks."""
        if self.place is None or self.sent(scope):
            return own
        texts = {str(index): text for index, text in (await self.ask("/metrics")).items()}
        return merged({str(self.place.index): own} | texts, [str(index) for index in range(self.place.count)])

    @contextlib.asynccontextmanager
    async def changing_layers(self, scope: Mapping[str, Any]) -> AsyncIterator["LayerJournal | None"]:
        """One change of layers in the fleet at a time; gives what notes it, None where nothing is to be noted."""
        if self.place is None or self.sent(scope):
            yield None
            return
        async with self.journal() as journal:
            yield journal

    @contextlib.asynccontextmanager
    async def journal(self) -> AsyncIterator["LayerJournal"]:
        """The fleet's registered layers, nobody else changing them."""
        assert self.place is not None
        with (self.place.folder / "lock").open("w") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            yield LayerJournal(self, self.place.folder)

    async def tell(self, method: str, path: str, headers: Mapping[str, str], body: bytes | memoryview) -> None:
        """Have the others do the same; one that cannot reads the journal before it is ready."""
        for index, answer in (await self._everybody(method, path, headers, bytes(body), _CHANGE_S)).items():
            if not answer.is_success:
                log.warning("process %d answered %d to %s %s", index, answer.status_code, method, path)

    async def _everybody(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> dict[int, httpx.Response]:
        if self.place is None:
            return {}
        others = [index for index in range(self.place.count) if index != self.place.index]
        asked = [self._request(index, method, path, headers, body, timeout_s) for index in others]
        answers = await asyncio.gather(*asked)
        return {index: answer for index, answer in zip(others, answers, strict=True) if answer is not None}

    async def _request(
        self, index: int, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> httpx.Response | None:
        assert self.place is not None
        # Nothing here speaks TLS, and loading the certificates that it would need holds the event loop for 50 ms.
        wire = httpx.AsyncHTTPTransport(uds=str(self.place.socket_of(index)), verify=False)
        async with httpx.AsyncClient(transport=wire, base_url="http://sibling", timeout=timeout_s) as client:
            try:
                return await client.request(method, path, headers=dict(headers), content=body)
            except httpx.TransportError:
                return None


class LayerJournal:
    """What was registered and removed, for processes that start later."""

    def __init__(self, siblings: Siblings, folder: Path) -> None:
        self._siblings = siblings
        self._folder = folder / "layers"
        self._folder.mkdir(exist_ok=True)

    async def put(self, name: str, query: bytes, headers: Mapping[str, str], body: memoryview) -> None:
        """A layer was registered by this query and body."""
        head = json.dumps({"query": query.decode("latin-1")}).encode()
        await asyncio.to_thread(self._write, name, head + b"\n" + body)
        await self._siblings.tell("PUT", f"/v1/layers/{name}?{query.decode('latin-1')}", headers, body)

    async def remove(self, name: str, headers: Mapping[str, str]) -> None:
        """A layer was removed, be it one of the checkpoint."""
        await asyncio.to_thread(self._write, name, b"null\n")
        await self._siblings.tell("DELETE", f"/v1/layers/{name}", headers, b"")

    def entries(self) -> Iterator[tuple[str, bytes | None, memoryview]]:
        """Name, query and body of each; None for the query of one that was removed."""
        for file in sorted(self._folder.glob("*.layer")):
            head, _, body = file.read_bytes().partition(b"\n")
            said = json.loads(head)
            query = None if said is None else said["query"].encode("latin-1")
            yield file.name.removesuffix(".layer"), query, memoryview(bytearray(body))

    def _write(self, name: str, content: bytes) -> None:
        file = self._folder / f"{name}.layer"
        part = self._folder / f"{name}.part"
        part.write_bytes(content)
        part.rename(file)
