"""A relayed request that the application answers, in the process that owns the device.

A front end receives the request's body and sends its response.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from starlette.types import ASGIApp, Message, Scope

from normserve.errors import ClientLeftError, NormserveError
from normserve.http.relay import relay_messages
from normserve.http.relay.relay_messages import SharedSlabRange
from normserve.http.transport import Buffers, Headers, IncomingBody, ResponseSender
from normserve.memory.shared_slabs import SlabLocation
from normserve.memory.slabs import SlabPool

INLINE_BYTES = 16 * 1024
"""Limit of a response piece that is sent in the message itself, in bytes."""

# Copying more would block the event loop for longer than a small request does.
_COPIED_HERE_BYTES = 256 * 1024


class FrontEndConnection(Protocol):
    """The connection from the process that owns the device to the front end that serves the client.

    Attributes:
        slab_pool: memory that can be shared with the front end.
    """

    slab_pool: SlabPool

    def end_request(self, number: int) -> None:
        """Ignore later messages about a request."""

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message to the front end."""

    def locate_and_share_slab(self, view: memoryview) -> SlabLocation | None:
        """Locate bytes in shared memory, and have the front end map their slab; return None for other memory."""


class RelayedRequest:
    """A relayed request that the ASGI application answers like any other request."""

    def __init__(
        self, front_end: FrontEndConnection, request: relay_messages.RequestStarted, scope: Scope, entrance: ASGIApp
    ) -> None:
        """Args: scope: the ASGI scope without the data of the connection."""
        self._front_end = front_end
        self._number = request.number
        self._asgi_app = entrance
        self._incoming_body = RelayedIncomingBody(front_end, request)
        self._response_sender = RelayedResponseSender(front_end, request.number)
        state = {"reception": self._incoming_body, "sending": self._response_sender}
        full_scope = {**scope, "client": request.client, "state": state}
        self._is_application_done = False
        self._task = asyncio.get_running_loop().create_task(self._run_application(full_scope))

    def abort_body_before_start(self, error: NormserveError, received: int) -> None:
        """Abort the body, of which `received` bytes have been received, with an error.

        This happens before the application begins, which then answers with that error.
        """
        self._incoming_body.received_bytes = received
        if isinstance(error, ClientLeftError):
            self._response_sender.handle_disconnect()
        self._incoming_body.abort(error)

    def on_progress(self, nbytes: int) -> None:
        """Record that the body's first `nbytes` are in its slab."""
        self._incoming_body.on_progress(nbytes)

    def on_message(self, message: Any) -> None:
        """Handle a message of the front end about this request."""
        match message:
            case relay_messages.ResponseSent():
                self._response_sender.on_response_sent(message)
            case relay_messages.BodyReceived():
                self._incoming_body.on_body_received(message)
            case relay_messages.BodyPart():
                self._incoming_body.on_body_part(message)
            case relay_messages.BodyAborted():
                self._incoming_body.on_body_aborted(is_client_disconnected=message.is_client_disconnected)
            case relay_messages.ClientDisconnected():
                self._incoming_body.handle_disconnect()
                self._response_sender.handle_disconnect()
        self._end_if_finished()

    def on_front_end_lost(self) -> None:
        """Abort the request: its front end, and with it the client's connection, has ended."""
        self._incoming_body.on_body_aborted(is_client_disconnected=True)
        self._response_sender.on_front_end_lost()

    async def _run_application(self, scope: Scope) -> None:
        """Have the application answer the request; report a response that it leaves incomplete."""
        try:
            await self._asgi_app(scope, self._incoming_body.receive_message, self._response_sender.send_message)
        finally:
            if not self._response_sender.is_response_complete:
                self._front_end.send_message(relay_messages.ResponseAborted(self._number))
            self._is_application_done = True
            self._end_if_finished()

    def _end_if_finished(self) -> None:
        """End the request once it is answered and the front end no longer writes to the body's slab."""
        if self._is_application_done and not self._incoming_body.is_memory_shared:
            self._front_end.end_request(self._number)


class RelayedIncomingBody(IncomingBody):
    """The body of a relayed request, which the front end receives into a slab or sends in pieces."""

    is_relayed = True

    def __init__(self, front_end: FrontEndConnection, request: relay_messages.RequestStarted) -> None:
        super().__init__(request.content_length, self._start_and_take_early_bytes)
        self._front_end = front_end
        self._number = request.number
        self._initial_bytes = request.body or bytearray()
        # The range that the front end writes to: not reused before the front end reports that it has stopped.
        self._shared_memory: memoryview | None = None
        self._is_requested = False
        self._next_part: asyncio.Future[relay_messages.BodyPart] | None = None
        self._is_client_disconnected = False
        if request.body is not None or request.content_length == 0:
            self.mark_complete()
        self.began_at = self._ended_at = request.began

    @property
    def is_memory_shared(self) -> bool:
        """Whether the front end may write to the body's memory."""
        return self._shared_memory is not None

    async def receive_into(self, make_room: Callable[[int], memoryview], **limits: float) -> memoryview:
        """Receive the body like `IncomingBody.receive_into`, but have the front end write it to the allocated
        memory.

        A chunked body is sent in pieces instead.
        """

        def make(nbytes: int) -> memoryview:
            room = make_room(nbytes)
            if self.content_length is not None:
                self._request_body_into(room)
            return room

        return await super().receive_into(make, **limits)

    async def receive_message(self) -> Message:
        """Request the body's next piece from the front end; return it as an ASGI message.

        For handlers that do not call `receive_into`.  A body that was received with the header is returned
        at once.
        """
        if self.is_complete and self._initial_bytes:
            body, self._initial_bytes = bytes(self._initial_bytes), bytearray()
            return {"type": "http.request", "body": body, "more_body": False}
        self._next_part = asyncio.get_running_loop().create_future()
        if self._is_client_disconnected:
            return {"type": "http.disconnect"}
        self._front_end.send_message(relay_messages.BodyPartRequest(self._number, all=False))
        try:
            piece = await self._next_part
        except ClientLeftError:
            return {"type": "http.disconnect"}
        except asyncio.CancelledError:
            self._front_end.send_message(relay_messages.BodyStopRequest(self._number))
            raise
        finally:
            self._next_part = None
        if not piece.more:
            self.mark_complete()
        return {"type": "http.request", "body": piece.data, "more_body": piece.more}

    def abort(self, error: NormserveError) -> None:
        """Abort the reception with an error, and have the front end stop receiving."""
        super().abort(error)
        if self._is_requested:
            self._is_requested = False
            self._front_end.send_message(relay_messages.BodyStopRequest(self._number))

    def on_progress(self, nbytes: int) -> None:
        """Record that the body's first `nbytes` are in its slab."""
        if self.is_receiving:
            self.received_bytes = nbytes

    def on_body_received(self, message: relay_messages.BodyReceived) -> None:
        """Complete the body, which the front end has received into its slab."""
        self._is_requested, self._shared_memory = False, None
        if self.is_receiving:
            self.received_bytes = message.nbytes
            self.mark_complete()
            self._ended_at = message.ended

    def on_body_part(self, piece: relay_messages.BodyPart) -> None:
        """Append the next piece to the body, or give it to a handler that waits in `receive_message`."""
        if self._next_part is not None:
            if not self._next_part.done():
                self._next_part.set_result(piece)
        elif self.is_receiving:
            if piece.data:
                self.append_part(piece.data)
            if not piece.more:
                self._is_requested = False
                self.mark_complete()

    def on_body_aborted(self, *, is_client_disconnected: bool) -> None:
        """Record that the front end has stopped, and no longer writes to the body's slab.

        If the client has disconnected, the body is aborted.
        """
        self._is_requested, self._shared_memory = False, None
        if is_client_disconnected:
            self.handle_disconnect()

    def handle_disconnect(self) -> None:
        """Record that the client has disconnected; abort the body if it is incomplete."""
        self._is_client_disconnected = True
        if self._next_part is not None and not self._next_part.done():
            self._next_part.set_exception(ClientLeftError("the client left"))
        if not self.is_complete:
            self.abort(ClientLeftError("the client left while its body was received"))

    def _start_and_take_early_bytes(self) -> bytearray:
        """Take the bytes that were received with the header; for a chunked body, also request the pieces.

        A body of announced length is requested later, when its memory is allocated.
        """
        if not self.is_complete and self.content_length is None:
            self._is_requested = True
            self._front_end.send_message(relay_messages.BodyPartRequest(self._number, all=True))
        early, self._initial_bytes = self._initial_bytes, bytearray()
        return early

    def _request_body_into(self, room: memoryview) -> None:
        """Have the front end receive the body into `room`.

        If that memory is not shared with the front end, have it send the body in pieces.
        """
        assert self.content_length is not None
        self._is_requested = True
        located = self._front_end.locate_and_share_slab(room)
        if located is None:
            self._front_end.send_message(relay_messages.BodyPartRequest(self._number, all=True))
            return
        self._shared_memory = room
        place = located.slab.number, located.offset
        self._front_end.send_message(relay_messages.BodyIntoSlabRequest(self._number, *place, self.content_length))


class RelayedResponseSender(ResponseSender):
    """The sender of a relayed request's response, which passes the response to the front end.

    Attributes:
        is_response_complete: whether the complete response has been passed to the front end.
    """

    is_relayed = True

    def __init__(self, front_end: FrontEndConnection, number: int) -> None:
        super().__init__()
        self._front_end = front_end
        self._number = number
        self._start_message: Message | None = None
        self._response_sent: asyncio.Future[relay_messages.ResponseSent] | None = None
        self._send_s = 0.0
        self.is_response_complete = False

    @property
    def send_s(self) -> float:
        return self._send_s

    async def send_response(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        """Pass a complete response to the front end; return when its last byte has been given to the operating
        system.

        Long buffers are passed in shared slabs, into which others are copied.  Nothing is sent to a client
        that has disconnected.
        """
        if self.is_delivered is not None:
            return
        # Buffers that are not shared are copied; the copies and the buffers live until they are sent.
        parts, held = [], []
        for buffer in buffers:
            part, view = await share_response_bytes(self._front_end, buffer)
            parts.append(part)
            held.append(view)
        response = relay_messages.CompleteResponse(self._number, status, list(headers), parts, nbytes)
        self.is_response_complete = True
        self._record_sent(await self._send_and_wait(response))

    async def send_message(self, message: Message) -> None:
        """Pass an ASGI message to the front end; return when its bytes have been given to the operating system.

        The start of the response is kept until its first piece.
        """
        if message["type"] == "http.response.start":
            self._start_message = message
            return
        if self.is_delivered is not None:
            return
        start, self._start_message = self._start_message, None
        status, headers = (0, []) if start is None else (start["status"], list(start["headers"]))
        data, more = message.get("body", b""), message.get("more_body", False)
        self.is_response_complete = not more
        sent = await self._send_and_wait(relay_messages.ResponsePart(self._number, status, headers, data, more))
        if not more:
            self._record_sent(sent)

    def on_response_sent(self, sent: relay_messages.ResponseSent) -> None:
        """End the wait for the last message's bytes, which the operating system has taken or never will."""
        if self._response_sent is not None and not self._response_sent.done():
            self._response_sent.set_result(sent)

    def handle_disconnect(self) -> None:
        """Mark the response as not delivered and call `on_disconnect`: the client has disconnected."""
        if self.is_delivered is None:
            self.is_delivered = False
            if self.on_disconnect is not None:
                self.on_disconnect()

    def on_front_end_lost(self) -> None:
        """End the response, which the front end cannot send any more."""
        self.handle_disconnect()
        self.on_response_sent(relay_messages.ResponseSent(self._number, self._send_s, is_delivered=False))

    async def _send_and_wait(self, message: msgspec.Struct) -> relay_messages.ResponseSent:
        """Send a message to the front end, and wait for its report that the bytes were sent."""
        self._began_at = self._began_at or time.perf_counter()
        self._response_sent = asyncio.get_running_loop().create_future()
        self._front_end.send_message(message)
        try:
            return await self._response_sent
        finally:
            self._response_sent = None

    def _record_sent(self, sent: relay_messages.ResponseSent) -> None:
        self._send_s, self.ended_at = sent.seconds, sent.ended
        if self.is_delivered is None:
            self.is_delivered = sent.is_delivered


async def share_response_bytes(
    front_end: FrontEndConnection, buffer: bytes | memoryview
) -> tuple[bytes | SharedSlabRange, object]:
    """Return a buffer for a message, as bytes if it is short, else if possible as a range of a shared slab.

    A long buffer outside shared memory is copied to a slab, on another thread.  The second value must
    live until the response has been sent.
    """
    shared = try_share_response_bytes(front_end, buffer)
    if shared is not None:
        return shared
    view = memoryview(buffer)
    copied = front_end.slab_pool.borrow(len(view))[: len(view)]
    await asyncio.to_thread(_copy_bytes, view, copied)
    return _locate_range(front_end, copied) or (bytes(view), None)


def try_share_response_bytes(
    front_end: FrontEndConnection, buffer: bytes | memoryview
) -> tuple[bytes | SharedSlabRange, object] | None:
    """Return a buffer as bytes or as a range of a shared slab, like `share_response_bytes`, if this needs no long
    copy.

    Return None if that needs a long copy, which would block the event loop.  The second value must live
    until the response has been sent.
    """
    if len(buffer) <= INLINE_BYTES:
        return bytes(buffer), None
    view = memoryview(buffer)
    located = _locate_range(front_end, view)
    if located is not None or len(view) > _COPIED_HERE_BYTES:
        return located
    copied = front_end.slab_pool.borrow(len(view))[: len(view)]
    _copy_bytes(view, copied)
    # The pool may return memory that cannot be shared, which a driver allocated.
    return _locate_range(front_end, copied) or (bytes(view), None)


def _locate_range(front_end: FrontEndConnection, view: memoryview) -> tuple[SharedSlabRange, memoryview] | None:
    located = front_end.locate_and_share_slab(view)
    return None if located is None else (SharedSlabRange(located.slab.number, located.offset, len(view)), view)


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    # Unlike a copy by memoryview, this one releases the GIL.
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
