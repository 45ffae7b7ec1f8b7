"""A connection without a socket, on an engine whose device does what a test says."""

import asyncio
import functools
import os
import struct
import time
from collections.abc import Callable

import msgspec
from normserve.admission.keys import Keyring
from normserve.admission.permits import AdmissionBudget
from normserve.codec import local_messages as frames
from normserve.layers.layer_changes import LayerChanges
from normserve.layers.registry import LayerRegistry
from normserve.local.client_segments import DeviceSegmentAllocator, HostSegmentAllocator, OrphanedSegments
from normserve.local.layer_messages import LayerMessageDispatcher
from normserve.local.local_services import LocalServices
from normserve.local.local_session import PeerProcess
from normserve.local.operation_planner import OperationPlanner
from normserve.local.server_connection import LocalServerConnection
from normserve.memory.device_segments import ShareableDevice
from normserve.peers.sibling_processes import SiblingProcesses
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.layer_requests import load_layer_onto_device
from normserve.requests.memory_admission import MemoryAdmission
from normserve.requests.request_lifecycle import RequestServices

from tests.service.engine.fake_engine import Scene, turn
from tests.service.memory.fake_driver import GRANULARITY, FakeDriver

MIB = 2**20


class FakeWire:
    """Keeps what is sent.

    Attributes:
        sent: answers with their tags.
        is_wanted: whether frames are read.
        pending_replays: answers that something else will send.
    """

    pending_replays = 0

    def __init__(self, connection: LocalServerConnection) -> None:
        self._socket = connection
        self.sent: list[tuple[int, frames.LocalResponse]] = []
        self.is_open = True
        self.is_wanted = False

    def set_receiving(self, *, wanted: bool) -> None:
        self.is_wanted = wanted

    def send_frame(self, frame: bytes, descriptors: tuple[int, ...] = (), on_lost=None) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        if self.is_open:
            tag = struct.unpack_from("<II", frame)[1]
            self.sent.append((tag, frames.decode_response(frame[frames.PREFIX.size :])))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._socket.on_end()


class Client:
    """One connection, and the engine behind it.

    Attributes:
        left: segments of the connection, once it has ended.
    """

    def __init__(self, *, most_requests: int = 1000, pid: int | None = None, keys: Keyring | None = None) -> None:
        """Args:
        pid: what the kernel says of the client's process, which is this one.
        keys: None where no key is asked for.
        """
        self.scene = Scene()
        self.engine, self.executor = self.scene.engine, self.scene.executor
        self.limits = AdmissionBudget(max_requests=most_requests, max_bytes=2**40)
        self.layer_messages = LayerRegistry(max_layers=4, max_bytes=2**30)
        self.progress = self.engine.launch_progress
        admission, metrics = MemoryAdmission(self.engine, 2**40), self.scene.metrics
        requests = RequestServices(self.engine, self.limits, admission, self.progress, metrics, timeout_ms=20_000)
        make = functools.partial(load_layer_onto_device, self.engine, self.layer_messages)
        self.host_allocator = HostSegmentAllocator(64 * MIB)
        self.orphaned_segments = OrphanedSegments()
        self.driver = FakeDriver()
        self.device_allocator = DeviceSegmentAllocator(4 * GRANULARITY, lambda: ShareableDevice(0, self.driver))
        self.service = LocalServices(
            requests,
            OperationPlanner(self.engine, self.layer_messages),
            LayerMessageDispatcher(
                requests, self.layer_messages, LayerChanges(self.layer_messages, SiblingProcesses(None), make)
            ),
            None if keys is None else KeyAuthorisation(keys, "in hello"),
            self.host_allocator,
            self.device_allocator,
            self.orphaned_segments,
            self._describe,
        )
        self.described = asyncio.Event()
        self.left: list | None = None
        peer = PeerProcess(os.getpid() if pid is None else pid, os.geteuid())
        self.connection = LocalServerConnection(self.service, peer, None, lambda: os.pidfd_open(os.getpid()))
        self.connection.on_closed = self._end
        self.wire = FakeWire(self.connection)
        self._tag = 0

    def connect(self) -> LocalServerConnection:
        """Return a further connection to the same server."""
        connection = LocalServerConnection(
            self.service, self.connection.peer, None, lambda: os.pidfd_open(os.getpid())
        )
        connection.start(FakeWire(connection))
        return connection

    async def start_and_capture_when_due(self, *, greet: bool = True) -> None:
        """Start the engine, and say hello."""
        await self.engine.start()
        self.engine.accept_jobs()
        self.connection.start(self.wire)
        if greet:
            assert (await self.request(frames.HelloMessage(frames.VERSION))).status == 200

    def send(self, message, tag: int = 0) -> None:
        """Have a frame come in: a message, several, or bytes."""
        content = message if isinstance(message, bytes) else msgspec.json.encode(message)
        now = time.perf_counter()
        self.connection.on_frame(tag, content, now, now)

    async def request(self, message) -> frames.LocalResponse:
        """Send a message and wait for its answer, which must be the last that came."""
        self._tag += 1
        before = len(self.wire.sent)
        self.send(message, self._tag)
        while len(self.wire.sent) == before:
            await asyncio.sleep(0)
        assert self.wire.sent[-1][0] == self._tag
        return self.wire.sent[-1][1]

    def compute(self, *, offset: int = 0, query: str = "") -> frames.ComputeMessage:
        """LayerNorm of 2 rows of 4 in segment 0, which `grow` has made."""
        return frames.ComputeMessage(
            "layer_norm",
            {"x": frames.TensorReference(0, offset, "float32", (2, 4))},
            {"y": frames.SegmentRange(0, offset + MIB // 2, 32)},
            query=query,
        )

    def statuses(self) -> dict[int, int]:
        """What has been answered, by tag."""
        return {tag: answer.status for tag, answer in self.wire.sent}

    async def finish(self, error=None) -> None:
        """End everything that runs."""
        await turn()
        while self.executor.running:
            self.executor.finish(error)
            await turn()

    async def _describe(self) -> dict[str, object]:
        await self.described.wait()
        return {"version": "a version"}

    def _end(self, segments: list) -> None:
        assert self.left is None, "the end is told of once"
        self.left = segments


def played(body: Callable, **options) -> None:
    """Run `body(client)` with a client that has a segment; afterwards nothing may be held."""

    async def run() -> None:
        client = Client(**options)
        await client.start_and_capture_when_due()
        assert (await client.request(frames.GrowArenaMessage(1))).segment == 0
        client.wire.sent.clear()
        await turn()
        await body(client)
        await client.finish()
        client.described.set()
        client.wire.close()
        await turn()
        assert client.limits.request_count == client.limits.used_bytes == 0
        assert client.progress.stalled_s == 0
        assert not client.connection.is_busy

    asyncio.run(asyncio.wait_for(run(), 20))
