"""One client: its messages, its arena, and the messages beside operations."""

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from normserve.admission.keys import KeyScope
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import LocalResponse, Message
from normserve.errors import MalformedPayloadError, NormserveError
from normserve.local.answers import LocalExchange, LocalResponder
from normserve.local.arena import SegmentTable
from normserve.local.computations import ConnectionComputations
from normserve.local.device import ChargedDeviceSegment
from normserve.local.layers import MessageOrigin
from normserve.local.memory import ChargedSegment, ClientSegment
from normserve.local.operations import ComputeRequest
from normserve.local.peer import PeerProcess
from normserve.local.service import LocalServices
from normserve.local.session import LocalSession
from normserve.local.wire import FrameSocket
from normserve.metrics.requests import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

#: Requests of one connection that are answered at the same time; of more the frames stay with the kernel.
MOST_UNDER_WAY = 64

_ANY = frozenset(KeyScope)

# Memory for a connection's prepared calls: about a thousand frames of one message with one tensor.  A model of
# fifty norms sends a hundred in each step, each with one of a few places for its results.
_PREPARED_BYTES = 8 * 2**20

# A prepared call takes less than this: for each message its plan, and for each byte of a frame the objects that are
# made from it, with those of the CPU backend.  Measured of one to seventeen tensors and of sixteen messages.
_BYTES_PER_MESSAGE, _BYTES_PER_BYTE = 3 * 2**9, 30

_UNANSWERED = (frames.CancelRequestMessage, frames.FreeSegmentMessage)

Said = Message | ComputeRequest


class LocalServerConnection:
    """Answers one client, until its socket ends.

    Attributes:
        peer: the client's process.
        on_gone: told that the connection has ended, and of the segments that the client has not given back.
    """

    def __init__(
        self, service: LocalServices, peer: PeerProcess, key_name: str | None, watch: Callable[[], int | None]
    ) -> None:
        """Args:
        key_name: of the API key that is used for the peer's user.
        watch: makes a descriptor that can be read once the peer has ended, while the connection is open; None
            where there is none.
        """
        self._service = service
        self._watch = watch
        self.peer = peer
        self.on_gone: Callable[[list[ClientSegment]], None] = service.leftovers.give_back
        self._session = LocalSession(peer.uid, key_name, service.authorisation)
        self._arena = SegmentTable()
        # Of the device: given back, and charged until the client's process has ended.
        self._spent: list[ChargedDeviceSegment] = []
        self._waiting: deque[tuple[int, Said, float, float]] = deque()
        # By frames: clients send the same few repeatedly.
        counters = service.requests.metrics.prepared_call_counters("connection")
        self._prepared = PreparedCallCache(_PREPARED_BYTES, counters)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = LocalResponder(service.requests, self._session)
        self._computations = ConnectionComputations(
            service, self._arena, self._prepared, self._answers, self._on_room
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests of it are under way."""
        return bool(self._tasks or self._computations.under_way or self._answers.flights)

    def serve(self, wire: FrameSocket) -> None:
        """Begin."""
        self._answers.wire = wire
        wire.read(wanted=True)

    def close(self) -> None:
        """End it from this side."""
        self._answers.close()

    def on_frame(self, tag: int, content: bytes, began: float, ended: float) -> None:
        """Answer what a frame says, each message under a tag of its own."""
        messages: Sequence[Said] | None = self._prepared.find(content)
        if messages is None:
            try:
                messages = self._read(content)
            except MalformedPayloadError as error:
                self._answers.refuse(tag, error, RequestRecord(transport="local", began=began))
                return
        if len(messages) == 1 and not self._waiting and self._has_room:
            self._begin(tag, messages[0], began, ended)
            return
        for index, message in enumerate(messages):
            self._waiting.append(((tag + index) % frames.TAGS, message, began, ended))
        self._begin_waiting()

    def _read(self, content: bytes) -> Sequence[Said]:
        said = [
            ComputeRequest(each) if isinstance(each, frames.ComputeMessage) else each
            for each in frames.decode_messages(content)
        ]
        # Only operations are sent repeatedly, and of these none that names a span.
        if all(isinstance(each, ComputeRequest) and not each.headers for each in said):
            self._prepared.keep(content, said, _BYTES_PER_MESSAGE * len(said) + _BYTES_PER_BYTE * len(content))
            if isinstance(first := said[0], ComputeRequest) and len(said) == 1:
                first.content = content
        return said

    def on_fault(self, error: NormserveError) -> None:
        """Say what is wrong, and end: it is unknown where the next frame begins."""
        self._answers.refuse(0, error, RequestRecord(transport="local"))
        self.close()

    def on_end(self) -> None:
        """The client has left: what waits is dropped, and results of what runs are discarded."""
        self._waiting.clear()
        self._forget()
        self._computations.abandon()
        self.on_gone(self._segments_left())

    def _segments_left(self) -> list[ClientSegment]:
        """What the client has of the server's memory; this connection has that no more."""
        segments: list[ClientSegment] = [*map(_get_segment, self._arena.segments.values()), *self._spent]
        # In its place: what is lent again while the connection ends may return there.
        self._spent.clear()
        self._arena.segments.clear()
        return segments

    def _begin_waiting(self) -> None:
        while self._waiting and self._has_room:
            self._begin(*self._waiting.popleft())
        wire = self._answers.wire
        if wire is not None:
            wire.read(wanted=not self._waiting)

    def _on_room(self) -> None:
        if self._waiting:
            self._begin_waiting()

    @property
    def _has_room(self) -> bool:
        """Whether another request may be answered now."""
        return len(self._tasks) + len(self._computations.under_way) < MOST_UNDER_WAY

    def _begin(self, tag: int, message: Said, began: float, ended: float) -> None:
        """Do what a message says; its frame came from `began` to `ended`."""
        if isinstance(message, _UNANSWERED):
            self._let_go(message)
            return
        record = RequestRecord(transport="local", stages={"recv": ended - began}, began=began)
        if isinstance(message, ComputeRequest):
            self._computations.begin(tag, message, record)
            return
        exchange = LocalExchange(self._answers, tag, record)
        task = asyncio.get_running_loop().create_task(self._attend(message, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_room()

    def _let_go(self, message: frames.CancelRequestMessage | frames.FreeSegmentMessage) -> None:
        """What has no answer: unknown numbers are ignored."""
        if isinstance(message, frames.FreeSegmentMessage):
            self._take_back(message.segment)
            return
        self._computations.withdraw(message.request)

    def _take_back(self, number: int | None) -> None:
        """Take a segment out of the arena, which the client has given back or has never received."""
        memory = None if number is None else self._arena.segments.pop(number, None)
        # What is known may lie there, and would keep it.
        self._forget()
        if memory is not None:
            segment = _get_segment(memory)
            if isinstance(segment, ChargedDeviceSegment):
                self._spent.append(segment)
            else:
                self._service.leftovers.give_back([segment])

    def _forget(self) -> None:
        self._prepared.clear()
        if self._service.replaying is not None:
            self._service.replaying.forget(self._answers)

    async def _attend(self, message: Message, exchange: LocalExchange) -> None:
        """Answer one message but an operation, whatever becomes of it, and account for it."""
        try:
            await self._answer(message, exchange)
        except Exception as error:
            exchange.refuse(error)
        else:
            exchange.end()

    async def _answer(self, message: Message, exchange: LocalExchange) -> None:
        record = exchange.record
        descriptors: tuple[int, ...] = ()
        on_lost: Callable[[], None] | None = None
        answer = LocalResponse(status=200, request_id=exchange.request_id)
        match message:
            case frames.HelloMessage():
                record.op = "hello"
                answer.document = self._session.greet(message, self._offered())
                exchange.caller = self._session.caller
            case frames.GrowArenaMessage():
                record.op = "grow"
                self._session.authorise(_ANY, exchange)
                descriptors = (await self._grow(message, answer),)
                on_lost = functools.partial(self._take_back, answer.segment)
            case frames.GetInfoMessage():
                record.op = "info"
                self._session.authorise(_ANY, exchange)
                answer.document = await self._service.describe()
            case _:
                record.op = "layers"
                sender = MessageOrigin(self._arena, self._session, exchange)
                answer.document, answer.status = await self._service.layers.answer(message, sender)
        record.status = answer.status
        self._answers.send(frames.encode_frame(exchange.tag, answer), descriptors, on_lost)

    def _offered(self) -> dict[str, Any]:
        """What the greeting says of the device's memory; nothing before the server is ready, which finds out."""
        service = self._service
        if service.requests.engine.device is None:
            return {}
        return {"device": service.device_memory.offer()}

    async def _grow(self, message: frames.GrowArenaMessage, answer: LocalResponse) -> int:
        """Make the segment that is asked for and say so in the answer; the descriptor to go with it."""
        service = self._service
        service.requests.engine.require_ready()
        # If the connection ends meanwhile, its peer can no longer be found.
        watch = self._watch()
        try:
            return await self._grown(message, answer)
        finally:
            if self._answers.is_open:
                if watch is not None:
                    os.close(watch)
            else:
                self._take_back(answer.segment)
                service.leftovers.keep(self.peer.pid, watch, self._segments_left())

    async def _grown(self, message: frames.GrowArenaMessage, answer: LocalResponse) -> int:
        service = self._service
        segment: ChargedSegment | ChargedDeviceSegment
        if message.memory == "device":
            lend = service.device_memory.lend(self.peer, message.nbytes, self._spent, service.leftovers)
            descriptor, segment = await lend
            answer.device, answer.nbytes = segment.device.uuid, len(segment)
            memory = segment.whole()
        else:
            # What this client has just given back does not count.
            await service.leftovers.settle()
            descriptor, segment = await service.memory.lend(self.peer.uid, message.nbytes)
            memory = memoryview(segment)
        answer.segment = self._arena.add(memory)
        return descriptor


def _get_segment(memory: memoryview) -> ChargedSegment | ChargedDeviceSegment:
    segment = memory.obj
    assert isinstance(segment, ChargedSegment | ChargedDeviceSegment)
    return segment
