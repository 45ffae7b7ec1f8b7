"""A connection with a socket, on an engine whose launches are captured at once, and a replayer on a fake driver."""

import asyncio
import dataclasses
import os
import re
import socket
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
from normserve.admission.keys import Keyring
from normserve.backends.cuda.replayer import build
from normserve.backends.replay_interface import CapturedLaunch
from normserve.codec import local_messages as frames
from normserve.codec.framing import FrameReader
from normserve.jobs.job import ReplaySlot
from normserve.local.frame_socket import FrameSocket
from normserve.local.local_session import PeerProcess
from normserve.local.request_replays import RequestReplays
from normserve.local.server_connection import LocalServerConnection
from normserve.requests.key_authorisation import KeyAuthorisation

from tests.service.backends.cuda.fake_driver import FakeDriver
from tests.service.local.fake_wire import Client

GRAPH = 7


class Replayed:
    """A client of such a connection.

    Attributes:
        driver: where captured launches go.
        is_captured: whether launches are captured from now on.
        by_python: jobs that the engine has had.
        recurrences: that are kept by anything.
    """

    def __init__(self, keys: Keyring | None = None, **options: Any) -> None:
        self.behind = Client(**options)
        self.driver = FakeDriver()
        self.is_captured = True
        self.by_python = 0
        self.recurrences: weakref.WeakSet[ReplaySlot] = weakref.WeakSet()
        backend = self.behind.executor.backend
        backend.make_replayer = lambda: build.load_extension()(**self.driver.addresses())
        backend.get_captured_launch = self._replay
        replaying = RequestReplays(
            self.behind.service.request_services,
            self.behind.layer_messages,
            keys,
            poll_s=0.0,
        )
        authorisation = None if keys is None else KeyAuthorisation(keys, "in hello")
        service = dataclasses.replace(
            self.behind.service, key_authorisation=authorisation, request_replays=replaying
        )
        self.replaying = replaying
        self.connection = LocalServerConnection(service, PeerProcess(os.getpid(), os.geteuid()), None, lambda: None)
        self.ended: list[object] = []
        self.connection.on_closed = self.ended.append
        self._frames = FrameReader(2**20)
        self._found: list[tuple[int, bytes]] = []

    def _replay(self, recurrence: ReplaySlot) -> CapturedLaunch | None:
        self.recurrences.add(recurrence)
        return CapturedLaunch(GRAPH, 8, (), recurrence) if self.is_captured else None

    async def start(self, key: str | None = None) -> None:
        """Connect, say hello and get a segment."""
        await self.behind.engine.start()
        self.behind.engine.accept_jobs()
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.wire = FrameSocket(ours, self.connection, frame_s=20.0, send_s=20.0, most_unsent=8)
        self.connection.start(self.wire)
        assert (await self.ask(frames.HelloMessage(frames.VERSION, key))).status == 200
        # The descriptor is not received: nothing here looks into the segment.
        assert (await self.ask(frames.GrowArenaMessage(1))).status == 200

    async def send(self, message: Any, tag: int = 1) -> None:
        """Send a message, or bytes as they are."""
        data = message if isinstance(message, bytes) else framed(message, tag)
        await asyncio.get_running_loop().sock_sendall(self.theirs, data)

    async def answer(self) -> tuple[int, frames.LocalResponse]:
        """The next answer, with its tag; jobs of the engine are run meanwhile."""
        loop = asyncio.get_running_loop()
        while not self._found:
            receiving = asyncio.ensure_future(loop.sock_recv(self.theirs, 2**16))
            while not receiving.done():
                if self.behind.executor.running:
                    self.by_python += len(self.behind.executor.finish().jobs)
                await asyncio.sleep(0)
            data = receiving.result()
            if not data:
                raise EOFError
            self._found += self._frames.feed(data)
        tag, content = self._found.pop(0)
        return tag, frames.decode_response(content)

    async def ask(self, message: Any, tag: int = 1) -> frames.LocalResponse:
        """Send a message and wait for its answer."""
        await self.send(message, tag)
        told, answer = await self.answer()
        assert told == tag
        return answer

    def compute(self, query: str = "", offset: int = 0) -> frames.ComputeMessage:
        """LayerNorm of 2 rows of 4."""
        return self.behind.compute(offset=offset, query=query)

    def counted(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.behind.scene.metrics.render().decode()
        found = re.findall(rf"^normserve_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))


def framed(message: Any, tag: int) -> bytes:
    content = msgspec.json.encode(message)
    return frames.PREFIX.pack(len(content), tag) + content


def played(body: Callable, key: str | None = None, **options: Any) -> None:
    """Run `body(client)` with a client that has a segment; afterwards nothing may be held."""

    async def run() -> None:
        client = Replayed(**options)
        await client.start(key)
        with client.theirs:
            await body(client)
            client.wire.close()
        client.driver.end(100)
        while client.behind.limits.request_count:
            await asyncio.sleep(0.001)
        assert client.behind.limits.used_bytes == 0
        assert client.behind.progress.stalled_s == 0
        assert not client.connection.is_busy
        assert len(client.ended) == 1

    asyncio.run(asyncio.wait_for(run(), 20))
