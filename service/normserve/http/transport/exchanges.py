"""The requests of a connection and their responses, from the end of a header to the last byte sent.

It extends uvicorn's httptools protocol with limits.  The boundaries of headers and bodies are determined by
`http`.
"""

import asyncio
import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from uvicorn._types import ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from normserve.errors import ClientLeftError, NormserveError, RequestTimeoutError
from normserve.http.transport.chunks import ChunkedBodyDecoder
from normserve.http.transport.draining import SMALL_BODY_BYTES, BodyDiscard, DiscardLimits
from normserve.http.transport.half_closed import HalfClosedMonitor, can_detect_disconnect
from normserve.http.transport.idle import IdleConnectionQueue
from normserve.http.transport.patience import ConnectionTimeouts, HeaderTimer, SlowReaderMonitor
from normserve.http.transport.reception import IncomingBody
from normserve.http.transport.sending import TLS_PORTION_BYTES, SocketResponseSender, count_unacknowledged_bytes

# Bytes per read while a header is expected: enough for it and a small body, and few enough that most of a large
# body, whose first bytes arrive with the header and must be copied, is received directly into its own memory.
HEAD_BYTES = 16 * 1024
# Time for a handshake, and for a header, on a connection beyond the limits: others wait for its place.
_HASTE_S = 1.0
_UNIX_BUFFER_BYTES = 4 * 2**20
_TLS_END_S = 0.2
# Time and bytes for a client until it reads the response to invalid input; less time where others wait for the
# connection's place.
_LINGER_S, _LINGER_BEYOND_S = 1.0, 0.1
_LINGER_BYTES = 8 * 2**20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """Limits and callbacks that all connections share.

    Attributes:
        drains: limits of bodies that are dropped.
        refuse: counts input that never became a request, and renders the response; the second argument is the
            request target, as far as it was received.
        idle: the connections that wait for a request.
        on_late_departure: called when a client left without reading a response that the kernel had taken.
    """

    patience: ConnectionTimeouts
    drains: DiscardLimits
    refuse: Callable[[NormserveError, str], bytes]
    on_late_departure: Callable[[], None]
    idle: IdleConnectionQueue = field(default_factory=IdleConnectionQueue)


class ExchangeProtocol(HttpToolsProtocol):
    """Receives bodies and sends responses, in order, and disconnects clients that are late, slow or gone.

    Attributes:
        unparsed: bytes still to come of a body of announced length.
        chunks: a chunked body that is arriving.
        address: of the client, as the limits of connections have it.
        beyond: the limit of connections that this one exceeds; then it is for a probe only.
    """

    address = ""
    beyond: str | None = None

    def __init__(self, manners: ConnectionPolicy, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._manners = manners
        self.url = b""
        # Whether a header has begun and is not complete.
        self._header_began = False
        # Bytes that arrived in one piece with the last complete header.
        self._bytes_behind_header = 0
        self._header_watch = HeaderTimer(self.loop, manners.patience, self._header_is_late)
        self._send_watch: SlowReaderMonitor | None = None
        self._half_closed_watch: HalfClosedMonitor | None = None
        self._reception: IncomingBody | None = None
        self._sending: SocketResponseSender | None = None
        # Requests whose response is not complete: the current one, and those pipelined behind it.
        self._unanswered: dict[SocketResponseSender, tuple[RequestResponseCycle, IncomingBody]] = {}
        self._refusal: NormserveError | None = None
        self._left_unread = False
        # The rest of the body of a refused request, which is the last one that came.
        self._drain: BodyDiscard | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._ignored_bytes = 0
        self._is_encrypted = False
        self.unparsed = 0
        self.chunks: ChunkedBodyDecoder | None = None

    def admit(self, address: str, beyond: str | None) -> float:
        """As `Connection.admit`."""
        self.address = address
        patience, idle = self._manners.patience, self._manners.idle
        if beyond is not None and not idle.close_oldest(None if beyond == "max_connections" else address):
            self.beyond = beyond
            patience = replace(patience, header_s=min(patience.header_s, _HASTE_S))
            self._header_watch = HeaderTimer(self.loop, patience, self._header_is_late)
        return patience.header_s

    @property
    def filling(self) -> IncomingBody | None:
        """The body into whose memory the next bytes can be received directly, if there is one."""
        reception = self._reception
        return reception if self.unparsed and reception is not None and reception.is_filling else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            # TCP grows its buffers by itself, up to about this.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        super().connection_made(transport)
        # With these limits, "paused" means that any byte is unsent, and "resumed" that the kernel has all of them.
        # uvloop's TLS pauses already at its limit, and passes encrypted data to a transport that buffers a write or
        # two.  The end of its handshake may be unsent now.
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None
        unseen = TLS_PORTION_BYTES if self._is_encrypted else 0
        self._send_watch = SlowReaderMonitor(self.loop, self._manners.patience, transport, unseen_bytes=unseen)
        transport.set_write_buffer_limits(1 if self._is_encrypted else 0)
        self._header_watch.start()
        if self.beyond is None:
            self._manners.idle.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._manners.idle.discard(self)
        self._header_watch.stop()
        if self._lingering is not None:
            self._lingering.cancel()
        for watch in (self._send_watch, self._half_closed_watch):
            if watch is not None:
                watch.stop()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._sending is not None and self._sending.is_delivered and (exc is not None or self._left_unread):
            self._manners.on_late_departure()
        for sending, (cycle, reception) in self._unanswered.items():
            cycle.disconnected = True
            cycle.message_event.set()
            reception.fail(ClientLeftError("the client left while its body was received"))
            sending.depart()
        self._stop_drain()
        self._unanswered.clear()
        self._reception = self._sending = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; return whether it may still read responses to its complete requests."""
        # A client that leaves in the middle of a response sends FIN first; a reset is visible by itself.
        self._left_unread = count_unacknowledged_bytes(self.transport) > 0
        whole = [cycle for cycle, _ in self._unanswered.values() if not cycle.more_body]
        if not whole or self.scheme == "https":
            return False
        if self._refusal is None:
            whole[-1].keep_alive = False
        if self._half_closed_watch is None:
            if not can_detect_disconnect(self.transport):
                next(iter(self._unanswered)).probe()
            self._half_closed_watch = HalfClosedMonitor(self.loop, self.transport)
        return True

    @property
    def _takes_requests(self) -> bool:
        """Whether the next bytes can still become a request."""
        if self._refusal is not None or self.transport.is_closing():
            return False
        return self.cycle is None or self.cycle.keep_alive

    def filled(self, nbytes: int) -> None:
        """Count bytes that were received into the memory of `filling`."""
        assert self._reception is not None
        self.unparsed -= nbytes
        self._reception.advance(nbytes)
        if not self.unparsed:
            self._end_body()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing() or self._drain is not None:
            return
        if self._reception is not None and self._reception.is_filling:
            self._reception.append(body)
        else:
            super().on_body(body)

    def _end_body(self) -> None:
        """The request is complete."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        cycle.more_body = False
        if not cycle.response_complete:
            cycle.message_event.set()
        if self._reception is not None:
            self._reception.complete()
        if self._drain is not None:
            self._stop_drain()
            if cycle.response_complete:
                self._end_exchange(cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._send_watch is not None
        # The first unanswered one: earlier responses are sent, and later ones wait for it.
        self._send_watch.start(next(iter(self._unanswered), None))

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._send_watch is not None
        self._send_watch.stop()

    def shutdown(self) -> None:
        if self._drain is not None:
            # The server waits for connections for a moment before it ends.
            self.cycle.keep_alive = False
            return
        super().shutdown()
        if self._is_encrypted and self.transport.is_closing():
            self.loop.call_later(_TLS_END_S, self._end_tls)

    def _end_tls(self) -> None:
        """Abort the connection of a client that does not answer the end of TLS, which it need not do."""
        if self.transport.get_extra_info("socket") is not None and not count_unacknowledged_bytes(self.transport):
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        # A client that has not read these bytes in all this time never will: closing would wait for it forever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _attend(self, cycle: RequestResponseCycle, announced: int | None) -> None:
        """Follow a request's body and response.

        Args: announced: bytes of the body; None if it is chunked.
        """
        self._end_idleness()
        reception = IncomingBody(announced, functools.partial(self._begin_body, cycle))
        sending = SocketResponseSender(
            self.transport, self.loop, cycle, is_encrypted=self._is_encrypted, close=self._close_after_body
        )
        cycle.transport = sending  # type: ignore[assignment]
        cycle.on_response = functools.partial(self._end_response, sending)
        cycle.send_500_response = sending.cut_off  # type: ignore[method-assign]
        cycle.scope["state"].update(reception=reception, sending=sending)
        self._reception, self._sending = reception, sending
        self._unanswered[sending] = cycle, reception
        if announced is None:
            self.chunks = ChunkedBodyDecoder()
        elif announced == 0:
            self._end_body()
        else:
            self.unparsed = announced
            if announced > HEAD_BYTES:
                # The rest of the body is not read before there is memory for it.
                self.flow.pause_reading()
        if announced is None or announced > self._bytes_behind_header:
            # The response may begin before the body is complete; the task that sends it has not run yet.
            cycle.send = functools.partial(self._send, cycle, reception, cycle.send)  # type: ignore[method-assign]

    def _begin_body(self, cycle: RequestResponseCycle) -> bytearray:
        """Start to receive a body; return the bytes that were already received."""
        early, cycle.body = cycle.body, bytearray()
        if cycle.more_body:
            if cycle.waiting_for_100_continue:
                self.transport.write(_CONTINUE)
            self.flow.resume_reading()
        cycle.waiting_for_100_continue = False
        return early

    async def _send(
        self, cycle: RequestResponseCycle, reception: IncomingBody, send: ASGISendCallable, message: ASGISendEvent
    ) -> None:
        """Send a message of a response; before the first one, begin to drop the rest of the request's body."""
        is_connected = not (cycle.disconnected or self.transport.is_closing())
        if message["type"] == "http.response.start" and cycle.more_body and is_connected:
            if cycle.waiting_for_100_continue and not cycle.body:
                # The client sends no body after a refusal.
                cycle.keep_alive = False
            else:
                await self._drop_body(cycle, reception, message["status"])
        await send(message)

    async def _drop_body(self, cycle: RequestResponseCycle, reception: IncomingBody, status: int) -> None:
        """Drop the rest of a body from now on.

        The connection is kept for the next request if the rest arrives in time.
        """
        self._drain = drain = BodyDiscard(self.loop, self._manners.drains, self.transport.close)
        cycle.body = bytearray()
        self.flow.resume_reading()
        announced = reception.announced
        # It is unknown when the rest of a body that was cut off will arrive.
        if announced is not None and announced <= SMALL_BODY_BYTES and not reception.is_cut_off:
            await drain.wait_for_small()
        if self._drain is None:
            return
        rest_bytes = None if self.chunks is not None else self.unparsed
        if not drain.limit(self._manners.patience, status, rest_bytes):
            cycle.keep_alive = False

    def _stop_drain(self) -> None:
        if self._drain is not None:
            self._drain.stop()
            self._drain = None

    def _close_after_body(self) -> None:
        """Close the connection; if its last response is complete and its body is still dropped, after that."""
        if self._drain is None or not self.cycle.response_complete:
            self.transport.close()

    def _end_exchange(self, cycle: RequestResponseCycle) -> None:
        """After a response, its body is complete, too: wait for the next request or close."""
        if not cycle.keep_alive:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._manners.idle.add(self)

    def _end_idleness(self) -> None:
        """A request has begun."""
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._manners.idle.discard(self)

    def _end_response(self, sending: SocketResponseSender) -> None:
        sending.finish()
        self._unanswered.pop(sending, None)
        self.on_response_complete()
        if self._drain is not None:
            self._unset_keepalive_if_required()
        elif self.timeout_keep_alive_task is not None and not self._header_began:
            self._manners.idle.add(self)
        if self.pipeline:
            # Each response would otherwise allow another read full of small requests.
            self.flow.pause_reading()
        elif self._refusal is not None and not self._unanswered:
            self._refuse(self._refusal)

    def _header_is_late(self) -> None:
        if self._header_began:
            self._refuse(RequestTimeoutError("the header was not complete in time"))
        else:
            self.transport.close()

    def _refuse(self, error: NormserveError) -> None:
        """Answer invalid input with an error, after the responses to earlier requests, and close."""
        if self.transport.is_closing():
            return
        self._header_began = False
        self._header_watch.stop()
        if self._drain is not None and self.cycle.response_complete:
            self.transport.close()
            return
        # An error in a body is the response to its request, unless a response has already begun.
        cycle = self.cycle if self._unanswered and self.cycle.more_body else None
        if cycle is not None and len(self._unanswered) > 1:
            # Its processing has not begun: earlier requests are answered first.
            self.pipeline.popleft()
            self._unanswered.popitem()
            cycle = None
        if self._unanswered and cycle is None:
            self._refusal = error
            self.flow.pause_reading()
            return
        if cycle is None or not cycle.response_started:
            self.transport.write(self._manners.refuse(error, self.url.decode("latin-1")))
        if cycle is None:
            self._refusal = error
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the connection once its client has, or soon: what is still sent would reset the response."""
        if self._is_encrypted or self.transport.is_closing():
            # The end of TLS waits for the client's.
            self.transport.close()
            return
        self.transport.write_eof()
        linger_s = _LINGER_S if self.beyond is None else _LINGER_BEYOND_S
        self._lingering = self.loop.call_later(linger_s, self.transport.close)

    def _ignore(self, nbytes: int) -> None:
        """Drop bytes that come after invalid input."""
        self._ignored_bytes += nbytes
        if self._ignored_bytes > _LINGER_BYTES:
            self.transport.close()
