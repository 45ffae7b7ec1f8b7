"""The requests of a connection and their responses, from the end of a header to the last byte sent.

It extends uvicorn's httptools protocol with limits.  The boundaries of headers and bodies are determined by
`http`.
"""

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from uvicorn._types import ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from normserve.codec.forwarded_for import TrustedProxies
from normserve.errors import ClientLeftError, NormserveError, RequestTimeoutError
from normserve.http.transport.body_discard import SMALL_BODY_BYTES, BodyDiscard, DiscardLimits
from normserve.http.transport.chunked_body import ChunkedBodyDecoder
from normserve.http.transport.connection_timeouts import ConnectionTimeouts, HeaderTimer, SlowReaderMonitor
from normserve.http.transport.idle_connections import IdleConnectionQueue
from normserve.http.transport.incoming_body import IncomingBody
from normserve.http.transport.response_sender import (
    TLS_PORTION_BYTES,
    HalfClosedMonitor,
    SocketResponseSender,
    can_detect_disconnect,
    count_unacknowledged_bytes,
)

# Bytes per read while a header is expected: enough for it and a small body, and few enough that most of a large
# body, whose first bytes arrive with the header and must be copied, is received directly into its own memory.
HEAD_BYTES = 16 * 1024
# Time for a handshake, and for a header, on a connection beyond the limits.
_HASTE_S = 1.0
_UNIX_BUFFER_BYTES = 4 * 2**20
# The address of a client on the Unix socket that has this process's user.
_OWN_USER = f"uid {os.geteuid()}"
_TLS_END_S = 0.2
# Time and bytes for a client until it reads the response to invalid input; the shorter time is for a connection
# beyond the limits.
_LINGER_S, _LINGER_BEYOND_S = 1.0, 0.1
_LINGER_BYTES = 8 * 2**20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """The limits and callbacks that all connections share.

    Attributes:
        discard_limits: limits of discarded bodies.
        render_refusal: counts invalid input that is not a request, and renders the response; the second
            argument is the received part of the request target.
        idle_connections: the connections that wait for a request.
        on_unread_response_disconnect: called when a client disconnected without reading a response that the
            operating system had taken.
        root_path: a path that is removed from the targets of requests that begin with it.
        proxies: those that name their clients; None if there are none.
    """

    timeouts: ConnectionTimeouts
    discard_limits: DiscardLimits
    render_refusal: Callable[[NormserveError, str], bytes]
    on_unread_response_disconnect: Callable[[], None]
    idle_connections: IdleConnectionQueue = field(default_factory=IdleConnectionQueue)
    root_path: bytes = b""
    proxies: TrustedProxies | None = None


class ExchangeProtocol(HttpToolsProtocol):
    """A connection that receives the bodies of requests and sends the responses, in order, but does not parse
    headers.

    Clients that are late or slow are disconnected.  A subclass parses the headers.

    Attributes:
        remaining_body_bytes: bytes that are still to be received of a body of announced length.
        chunked_decoder: the decoder of a chunked body that is being received.
        address: the client's address, in the form that the limits of connections use.
        exceeded_limit: the limit of connections that this one exceeds; it is then restricted to one probe.
    """

    address = ""
    exceeded_limit: str | None = None

    def __init__(self, policy: ConnectionPolicy, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._policy = policy
        self.url = b""
        # Whether a header has begun and is not complete.
        self._is_header_open = False
        # Bytes that arrived in one piece with the last complete header.
        self._bytes_after_header = 0
        self._header_timer = HeaderTimer(self.loop, policy.timeouts, self._on_header_timeout)
        self._slow_reader_monitor: SlowReaderMonitor | None = None
        self._half_closed_monitor: HalfClosedMonitor | None = None
        self._incoming_body: IncomingBody | None = None
        self._response_sender: SocketResponseSender | None = None
        # Requests whose response is not complete: the current one, and those pipelined behind it.
        self._open_exchanges: dict[SocketResponseSender, tuple[RequestResponseCycle, IncomingBody]] = {}
        self._refusal_error: NormserveError | None = None
        self._has_unread_response = False
        # The remaining body of a refused request, which is the last received one.
        self._body_discard: BodyDiscard | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._ignored_bytes = 0
        self._is_encrypted = False
        self.remaining_body_bytes = 0
        self.chunked_decoder: ChunkedBodyDecoder | None = None

    def admit(self, address: str, exceeded_limit: str | None) -> float:
        """Admit the connection, before `connection_made`; return how many seconds its TLS handshake may take.

        If it exceeds a limit, the oldest idle connection is closed in its place.  If none is idle, this one
        may send only one probe.

        Args:
            address: the client's address, in the form that the limits of connections use.
            exceeded_limit: the limit that the connection exceeds; None within all limits.
        """
        self.address = address
        patience, idle = self._policy.timeouts, self._policy.idle_connections
        if exceeded_limit is not None and not idle.try_close_oldest(
            None if exceeded_limit == "max_connections" else address
        ):
            self.exceeded_limit = exceeded_limit
            patience = replace(patience, header_s=min(patience.header_s, _HASTE_S))
            self._header_timer = HeaderTimer(self.loop, patience, self._on_header_timeout)
        return patience.header_s

    @property
    def is_from_own_user(self) -> bool:
        """Whether the client's process is on this host and has this process's user."""
        return self.address == _OWN_USER

    @property
    def direct_body(self) -> IncomingBody | None:
        """The body into whose memory the next bytes can be received directly, if there is one."""
        reception = self._incoming_body
        return reception if self.remaining_body_bytes and reception is not None and reception.is_receiving else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header's timer and mark the connection as idle, in addition to uvicorn's setup.

        Writing pauses as soon as the operating system does not take all bytes, which starts the monitor of slow
        readers.
        """
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            # TCP grows its buffers by itself, up to about this.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        super().connection_made(transport)
        # With these limits, "paused" means that any byte is unsent, and "resumed" that the operating system has all
        # of them. # uvloop's TLS pauses already at its limit, and passes encrypted data to a transport that buffers
        # a write or # two.  The end of its handshake may be unsent now.
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None
        unseen = TLS_PORTION_BYTES if self._is_encrypted else 0
        self._slow_reader_monitor = SlowReaderMonitor(
            self.loop, self._policy.timeouts, transport, unseen_bytes=unseen
        )
        transport.set_write_buffer_limits(1 if self._is_encrypted else 0)
        self._header_timer.start()
        if self.exceeded_limit is None:
            self._policy.idle_connections.add_connection(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and abort the bodies and responses in progress.

        A disconnect is reported as late if the client may not have read a response that the operating system had
        taken.
        """
        super().connection_lost(exc)
        self._policy.idle_connections.discard_connection(self)
        self._header_timer.stop()
        if self._close_timer is not None:
            self._close_timer.cancel()
        for watch in (self._slow_reader_monitor, self._half_closed_monitor):
            if watch is not None:
                watch.stop()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if (
            self._response_sender is not None
            and self._response_sender.is_delivered
            and (exc is not None or self._has_unread_response)
        ):
            self._policy.on_unread_response_disconnect()
        for sending, (cycle, reception) in self._open_exchanges.items():
            cycle.disconnected = True
            cycle.message_event.set()
            reception.abort(ClientLeftError("the client left while its body was received"))
            sending.handle_disconnect()
        self._stop_discard()
        self._open_exchanges.clear()
        self._incoming_body = self._response_sender = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data; return whether the connection stays open for responses.

        It does if a complete request is unanswered, except with TLS.  From then on, a monitor checks
        whether the client has disconnected.
        """
        # A client that disconnects in the middle of a response sends FIN first; a reset is visible by itself.
        self._has_unread_response = count_unacknowledged_bytes(self.transport) > 0
        complete_cycles = [cycle for cycle, _ in self._open_exchanges.values() if not cycle.more_body]
        if not complete_cycles or self.scheme == "https":
            return False
        if self._refusal_error is None:
            complete_cycles[-1].keep_alive = False
        if self._half_closed_monitor is None:
            if not can_detect_disconnect(self.transport):
                next(iter(self._open_exchanges)).send_disconnect_probe()
            self._half_closed_monitor = HalfClosedMonitor(self.loop, self.transport)
        return True

    @property
    def _is_accepting_requests(self) -> bool:
        """Whether further received bytes are parsed as a request, and not ignored."""
        if self._refusal_error is not None or self.transport.is_closing():
            return False
        return self.cycle is None or self.cycle.keep_alive

    def count_direct_bytes(self, nbytes: int) -> None:
        """Count bytes that the connection has received into the memory of `direct_body`."""
        assert self._incoming_body is not None
        self.remaining_body_bytes -= nbytes
        self._incoming_body.count_received(nbytes)
        if not self.remaining_body_bytes:
            self._complete_body()

    def on_body(self, body: bytes) -> None:
        """Append bytes to the body that a handler receives; if none receives it, pass the bytes to uvicorn.

        The bytes of a discarded body are ignored.
        """
        if self.transport.is_closing() or self._body_discard is not None:
            return
        if self._incoming_body is not None and self._incoming_body.is_receiving:
            self._incoming_body.append_part(body)
        else:
            super().on_body(body)

    def _complete_body(self) -> None:
        """Mark the request's body as complete; if it was being discarded, stop the discarding.

        If the response is complete, too, the connection waits for the next request.
        """
        if self.transport.is_closing():
            return
        cycle = self.cycle
        cycle.more_body = False
        if not cycle.response_complete:
            cycle.message_event.set()
        if self._incoming_body is not None:
            self._incoming_body.mark_complete()
        if self._body_discard is not None:
            self._stop_discard()
            if cycle.response_complete:
                self._keep_or_close(cycle)

    def pause_writing(self) -> None:
        """Pause the application's writes, and start to monitor how fast the client reads.

        asyncio calls this when the operating system takes no more bytes.
        """
        super().pause_writing()
        assert self._slow_reader_monitor is not None
        # The first unanswered one: earlier responses are sent, and later ones wait for it.
        self._slow_reader_monitor.start(next(iter(self._open_exchanges), None))

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._slow_reader_monitor is not None
        self._slow_reader_monitor.stop()

    def shutdown(self) -> None:
        """Close the connection if it is idle, else after its current response.

        A body that is being discarded is completed first.  Called when the server stops, or needs the
        connection for another client.
        """
        if self._body_discard is not None:
            # The server waits for connections for a moment before it ends.
            self.cycle.keep_alive = False
            return
        super().shutdown()
        if self._is_encrypted and self.transport.is_closing():
            self.loop.call_later(_TLS_END_S, self._abort_unfinished_tls)

    def _abort_unfinished_tls(self) -> None:
        """Abort the connection of a client that does not answer the end of TLS, which it need not do."""
        if self.transport.get_extra_info("socket") is not None and not count_unacknowledged_bytes(self.transport):
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle for too long.

        It is aborted if the client has not read its last response, because closing would wait for that.
        """
        # A client that has not read these bytes in all this time never will: closing would wait for it forever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _begin_exchange(self, cycle: RequestResponseCycle, content_length: int | None) -> None:
        """Set up the reception of a request's body and the sending of its response.

        Args: content_length: the length of the body in bytes; None if it is chunked.
        """
        self._mark_busy()
        reception = IncomingBody(content_length, functools.partial(self._start_and_take_early_bytes, cycle))
        sending = SocketResponseSender(
            self.transport, self.loop, cycle, is_encrypted=self._is_encrypted, close=self._close_unless_discarding
        )
        cycle.transport = sending  # type: ignore[assignment]
        cycle.on_response = functools.partial(self._finish_response, sending)
        cycle.send_500_response = sending.abort_connection  # type: ignore[method-assign]
        cycle.scope["state"].update(reception=reception, sending=sending)
        self._incoming_body, self._response_sender = reception, sending
        self._open_exchanges[sending] = cycle, reception
        if content_length is None:
            self.chunked_decoder = ChunkedBodyDecoder()
        elif content_length == 0:
            self._complete_body()
        else:
            self.remaining_body_bytes = content_length
            if content_length > HEAD_BYTES:
                # More of the body is not read before it has memory.
                self.flow.pause_reading()
        if content_length is None or content_length > self._bytes_after_header:
            # The response may begin before the body is complete; the task that sends it has not run yet.
            cycle.send = functools.partial(self._send_message, cycle, reception, cycle.send)  # type: ignore[method-assign]

    def _start_and_take_early_bytes(self, cycle: RequestResponseCycle) -> bytearray:
        """Start to receive a body for its handler; return the bytes that were already received.

        Reading continues, and a client that waits for `100 Continue` gets it.
        """
        early, cycle.body = cycle.body, bytearray()
        if cycle.more_body:
            if cycle.waiting_for_100_continue:
                self.transport.write(_CONTINUE)
            self.flow.resume_reading()
        cycle.waiting_for_100_continue = False
        return early

    async def _send_message(
        self, cycle: RequestResponseCycle, reception: IncomingBody, send: ASGISendCallable, message: ASGISendEvent
    ) -> None:
        """Send an ASGI message of a response.

        If a response starts while its request's body is incomplete, begin to discard the body first.
        """
        is_connected = not (cycle.disconnected or self.transport.is_closing())
        if message["type"] == "http.response.start" and cycle.more_body and is_connected:
            if cycle.waiting_for_100_continue and not cycle.body:
                # The client sends no body after a refusal.
                cycle.keep_alive = False
            else:
                await self._begin_discard(cycle, reception, message["status"])
        await send(message)

    async def _begin_discard(self, cycle: RequestResponseCycle, reception: IncomingBody, status: int) -> None:
        """Begin to discard the rest of a request's body; if the body is small, wait for its end before the response
        is sent.

        The connection is kept for the next request if the body is completed in time.
        """
        self._body_discard = drain = BodyDiscard(self.loop, self._policy.discard_limits, self.transport.close)
        cycle.body = bytearray()
        self.flow.resume_reading()
        announced = reception.content_length
        # It is unknown when the remaining bytes of an aborted body will arrive.
        if announced is not None and announced <= SMALL_BODY_BYTES and not reception.is_aborted:
            await drain.wait_small_body()
        if self._body_discard is None:
            return
        rest_bytes = None if self.chunked_decoder is not None else self.remaining_body_bytes
        if not drain.try_start_long_limit(self._policy.timeouts, status, rest_bytes):
            cycle.keep_alive = False

    def _stop_discard(self) -> None:
        if self._body_discard is not None:
            self._body_discard.stop()
            self._body_discard = None

    def _close_unless_discarding(self) -> None:
        """Close the connection after its last response, unless the body of that request is still being discarded.

        In that case the connection is closed at the end of the body.
        """
        if self._body_discard is None or not self.cycle.response_complete:
            self.transport.close()

    def _keep_or_close(self, cycle: RequestResponseCycle) -> None:
        """Mark the connection as idle; if it is not kept alive, close it instead.

        Called when the last request has been received and answered completely.
        """
        if not cycle.keep_alive:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._policy.idle_connections.add_connection(self)

    def _mark_busy(self) -> None:
        """Mark the connection as no longer idle, because the client has begun a request."""
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._policy.idle_connections.discard_connection(self)

    def _finish_response(self, sending: SocketResponseSender) -> None:
        """Handle the end of a response: begin the next pipelined request, or mark the connection as idle.

        Invalid input that followed the request is now answered.
        """
        sending.finish_response()
        self._open_exchanges.pop(sending, None)
        self.on_response_complete()
        if self._body_discard is not None:
            self._unset_keepalive_if_required()
        elif self.timeout_keep_alive_task is not None and not self._is_header_open:
            self._policy.idle_connections.add_connection(self)
        if self.pipeline:
            # Each response would otherwise allow another read full of small requests.
            self.flow.pause_reading()
        elif self._refusal_error is not None and not self._open_exchanges:
            self._refuse_input(self._refusal_error)

    def _on_header_timeout(self) -> None:
        """Answer an incomplete header with an error; close the connection if no header has begun."""
        if self._is_header_open:
            self._refuse_input(RequestTimeoutError("the header was not complete in time"))
        else:
            self.transport.close()

    def _refuse_input(self, error: NormserveError) -> None:
        """Answer invalid input with an error and close the connection.

        Earlier requests are answered first.  If the response to the request has already begun, only close
        the connection.
        """
        if self.transport.is_closing():
            return
        self._is_header_open = False
        self._header_timer.stop()
        if self._body_discard is not None and self.cycle.response_complete:
            self.transport.close()
            return
        # An error in a body is the response to its request, unless a response has already begun.
        cycle = self.cycle if self._open_exchanges and self.cycle.more_body else None
        if cycle is not None and len(self._open_exchanges) > 1:
            # Its processing has not begun: earlier requests are answered first.
            self.pipeline.popleft()
            self._open_exchanges.popitem()
            cycle = None
        if self._open_exchanges and cycle is None:
            self._refusal_error = error
            self.flow.pause_reading()
            return
        if cycle is None or not cycle.response_started:
            self.transport.write(self._policy.render_refusal(error, self.url.decode("latin-1")))
        if cycle is None:
            self._refusal_error = error
            self._close_after_client()
        else:
            self.transport.close()

    def _close_after_client(self) -> None:
        """Stop sending now, and close the connection when the client has closed its side, at the latest after a
        second.

        If the client sent data after a close, the connection would be reset, and the client might not read
        the response.  A connection with TLS is closed at once, because the end of TLS waits for the client.
        """
        if self._is_encrypted or self.transport.is_closing():
            # The TLS shutdown waits for that of the client.
            self.transport.close()
            return
        self.transport.write_eof()
        linger_s = _LINGER_S if self.exceeded_limit is None else _LINGER_BEYOND_S
        self._close_timer = self.loop.call_later(linger_s, self.transport.close)

    def _ignore_bytes(self, nbytes: int) -> None:
        """Count ignored bytes that follow invalid input; close the connection when they are too many."""
        self._ignored_bytes += nbytes
        if self._ignored_bytes > _LINGER_BYTES:
            self.transport.close()
