"""A relayed request as seen by the application, in the process that owns the device."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from starlette.types import Message

from normserve.errors import ClientLeftError, NormserveError
from normserve.http.relay import messages
from normserve.http.relay.messages import SharedSlabRange
from normserve.http.transport import Buffers, Headers, IncomingBody, ResponseSender
from normserve.memory.shared_slabs import SlabLocation
from normserve.memory.slabs import SlabPool

INLINE_BYTES = 16 * 1024
"""Shorter pieces of a response go along with the message."""

# To copy more would hold up the event loop for longer than a small request does.
_COPIED_HERE_BYTES = 256 * 1024


class FrontEndConnection(Protocol):
    """Where a request came from.

    Attributes:
        slabs: memory that can be shared with it.
    """

    slabs: SlabPool

    def end(self, number: int) -> None:
        """Nothing more is said about a request."""

    def send(self, message: msgspec.Struct) -> None:
        """Say something to it."""

    def locate(self, view: memoryview) -> SlabLocation | None:
        """Where bytes lie, if it can reach them; it has that memory mapped from now on."""


class RelayedIncomingBody(IncomingBody):
    """A request's body, which a front end receives."""

    def __init__(self, front_end: FrontEndConnection, request: messages.RequestStarted) -> None:
        super().__init__(request.announced, self._let_come)
        self._front_end = front_end
        self._number = request.number
        self._early = request.body or bytearray()
        # What the front end writes to: not reused before the front end says that it has stopped.
        self._lent: memoryview | None = None
        self._is_coming = False
        self._piece: asyncio.Future[messages.BodyPart] | None = None
        self._has_left = False
        if request.body is not None or request.announced == 0:
            self.complete()
        self.began = self._ended = request.began

    @property
    def is_lent(self) -> bool:
        """Whether the front end may write to the body's memory."""
        return self._lent is not None

    async def into(self, make_room: Callable[[int], memoryview], **limits: float) -> memoryview:
        def make(nbytes: int) -> memoryview:
            room = make_room(nbytes)
            if self.announced is not None:
                self._lend(room)
            return room

        return await super().into(make, **limits)

    async def receive(self) -> Message:
        """The next message, in ASGI's form."""
        if self.is_complete and self._early:
            body, self._early = bytes(self._early), bytearray()
            return {"type": "http.request", "body": body, "more_body": False}
        self._piece = asyncio.get_running_loop().create_future()
        if self._has_left:
            return {"type": "http.disconnect"}
        self._front_end.send(messages.BodyPartRequest(self._number, all=False))
        try:
            piece = await self._piece
        except ClientLeftError:
            return {"type": "http.disconnect"}
        except asyncio.CancelledError:
            self._front_end.send(messages.BodyStopRequest(self._number))
            raise
        finally:
            self._piece = None
        if not piece.more:
            self.complete()
        return {"type": "http.request", "body": piece.data, "more_body": piece.more}

    def fail(self, error: NormserveError) -> None:
        super().fail(error)
        if self._is_coming:
            self._is_coming = False
            self._front_end.send(messages.BodyStopRequest(self._number))

    def on_progress(self, nbytes: int) -> None:
        """So many bytes have come to their place."""
        if self.is_filling:
            self.received = nbytes

    def on_received(self, message: messages.BodyReceived) -> None:
        """All of them have."""
        self._is_coming, self._lent = False, None
        if self.is_filling:
            self.received = message.nbytes
            self.complete()
            self._ended = message.ended

    def on_piece(self, piece: messages.BodyPart) -> None:
        """The next of a body that has no place."""
        if self._piece is not None:
            if not self._piece.done():
                self._piece.set_result(piece)
        elif self.is_filling:
            if piece.data:
                self.append(piece.data)
            if not piece.more:
                self._is_coming = False
                self.complete()

    def on_ended(self, *, left: bool) -> None:
        """The rest will not come, and the place is not written to any more."""
        self._is_coming, self._lent = False, None
        if left:
            self.on_left()

    def on_left(self) -> None:
        """The client has gone."""
        self._has_left = True
        if self._piece is not None and not self._piece.done():
            self._piece.set_exception(ClientLeftError("the client left"))
        if not self.is_complete:
            self.fail(ClientLeftError("the client left while its body was received"))

    def _let_come(self) -> bytearray:
        """A route wants the body; what came already."""
        if not self.is_complete and self.announced is None:
            self._is_coming = True
            self._front_end.send(messages.BodyPartRequest(self._number, all=True))
        early, self._early = self._early, bytearray()
        return early

    def _lend(self, room: memoryview) -> None:
        """Have the body received there."""
        assert self.announced is not None
        self._is_coming = True
        located = self._front_end.locate(room)
        if located is None:
            self._front_end.send(messages.BodyPartRequest(self._number, all=True))
            return
        self._lent = room
        place = located.memory.number, located.offset
        self._front_end.send(messages.BodyLocation(self._number, *place, self.announced))


class RelayedResponseSender(ResponseSender):
    """A response, which a front end sends.

    Attributes:
        is_answered: it has all of it.
    """

    def __init__(self, front_end: FrontEndConnection, number: int) -> None:
        super().__init__()
        self._front_end = front_end
        self._number = number
        self._start: Message | None = None
        self._sent: asyncio.Future[messages.ResponseSent] | None = None
        self._seconds = 0.0
        self.is_answered = False

    @property
    def seconds(self) -> float:
        return self._seconds

    async def respond(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        if self.is_delivered is not None:
            return
        # What is not shared is copied; that and the buffers live until they are sent.
        parts, held = [], []
        for buffer in buffers:
            part, view = await share_response_bytes(self._front_end, buffer)
            parts.append(part)
            held.append(view)
        told = messages.CompleteResponse(self._number, status, list(headers), parts, nbytes)
        self.is_answered = True
        self._conclude(await self._say(told))

    async def send(self, message: Message) -> None:
        """The next message, of an application that answers the ASGI way."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self.is_delivered is not None:
            return
        start, self._start = self._start, None
        status, headers = (0, []) if start is None else (start["status"], list(start["headers"]))
        data, more = message.get("body", b""), message.get("more_body", False)
        self.is_answered = not more
        sent = await self._say(messages.ResponsePart(self._number, status, headers, data, more))
        if not more:
            self._conclude(sent)

    def on_sent(self, sent: messages.ResponseSent) -> None:
        """What was said last has been taken by the kernel, or never will be."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(sent)

    def on_left(self) -> None:
        """The client has gone."""
        if self.is_delivered is None:
            self.is_delivered = False
            if self.on_departure is not None:
                self.on_departure()

    def on_front_end_lost(self) -> None:
        """It will not be sent."""
        self.on_left()
        self.on_sent(messages.ResponseSent(self._number, self._seconds, is_delivered=False))

    async def _say(self, message: msgspec.Struct) -> messages.ResponseSent:
        self._began = self._began or time.perf_counter()
        self._sent = asyncio.get_running_loop().create_future()
        self._front_end.send(message)
        try:
            return await self._sent
        finally:
            self._sent = None

    def _conclude(self, sent: messages.ResponseSent) -> None:
        self._seconds = sent.seconds
        if self.is_delivered is None:
            self.is_delivered = sent.is_delivered


async def share_response_bytes(
    front_end: FrontEndConnection, buffer: bytes | memoryview
) -> tuple[bytes | SharedSlabRange, object]:
    """A piece of a response as it is told; with it what must live until it has been sent."""
    told = try_share_response_bytes(front_end, buffer)
    if told is not None:
        return told
    view = memoryview(buffer)
    copied = front_end.slabs.take(len(view))[: len(view)]
    await asyncio.to_thread(_copy_bytes, view, copied)
    return _locate_range(front_end, copied) or (bytes(view), None)


def try_share_response_bytes(
    front_end: FrontEndConnection, buffer: bytes | memoryview
) -> tuple[bytes | SharedSlabRange, object] | None:
    """`share_response_bytes`; None where the event loop should not wait for it."""
    if len(buffer) <= INLINE_BYTES:
        return bytes(buffer), None
    view = memoryview(buffer)
    located = _locate_range(front_end, view)
    if located is not None or len(view) > _COPIED_HERE_BYTES:
        return located
    copied = front_end.slabs.take(len(view))[: len(view)]
    _copy_bytes(view, copied)
    # Memory that cannot be shared came of the pool: a driver's.
    return _locate_range(front_end, copied) or (bytes(view), None)


def _locate_range(front_end: FrontEndConnection, view: memoryview) -> tuple[SharedSlabRange, memoryview] | None:
    located = front_end.locate(view)
    return None if located is None else (SharedSlabRange(located.memory.number, located.offset, len(view)), view)


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    # Unlike a memoryview's own, this copy leaves Python's lock to others.
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
