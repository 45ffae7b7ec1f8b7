"""uvicorn's httptools protocol, with the limits and the manners that it lacks, and bodies that bypass it."""

import asyncio
import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from normserve.errors import (
    ClientLeftError,
    HeadersTooLargeError,
    MalformedHttpError,
    NormserveError,
    RequestTimeoutError,
)
from normserve.transport.patience import HeaderWatch, Patience, SendWatch
from normserve.transport.reception import Reception, announced_bytes
from normserve.transport.sending import Sending, unread_bytes

# Read at once while a header is expected: enough for it and a small body, and little enough that of a large body,
# whose first bytes come along and must be copied, most goes straight to its place.
HEAD_BYTES = 16 * 1024
_MAX_HEADER_BYTES = 64 * 1024
_UNIX_BUFFER_BYTES = 4 * 2**20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Manners:
    """What all connections share.

    Attributes:
        refuse: counts what never became a request, and renders the answer to it.
        on_late_departure: a client left with a response that the kernel had taken and that it had not read.
    """

    patience: Patience
    refuse: Callable[[NormserveError], bytes]
    on_late_departure: Callable[[], None]


class HttpProtocol(HttpToolsProtocol):
    """Parses headers and small or chunked bodies; large ones are received around the parser.

    Attributes:
        unparsed: bytes still to come of a body that the parser will not see.
    """

    def __init__(self, manners: Manners, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._manners = manners
        self._header_bytes = 0
        self._reading_header = True
        self._header_began = False
        self._header_watch = HeaderWatch(self.loop, manners.patience, self._header_is_late)
        self._send_watch: SendWatch | None = None
        self._reception: Reception | None = None
        self._sending: Sending | None = None
        # Requests whose answer is not out: the one that is worked on, and those pipelined behind it.
        self._unanswered: dict[Sending, tuple[RequestResponseCycle, Reception]] = {}
        self._refusal: NormserveError | None = None
        self._left_unread = False
        self.unparsed = 0

    @property
    def expects_header(self) -> bool:
        """The next bytes are no body's."""
        return self._reading_header or self._reception is None or self._reception.is_complete

    @property
    def filling(self) -> Reception | None:
        """The body whose next bytes belong straight into its memory, if there is one."""
        reception = self._reception
        return reception if self.unparsed and reception is not None and reception.is_filling else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Paused means that anything is unsent, and resumed that the kernel has all of it.
        transport.set_write_buffer_limits(0)
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            # TCP grows its buffers by itself, up to about this.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        super().connection_made(transport)
        self._send_watch = SendWatch(self.loop, self._manners.patience, transport)
        self._header_watch.start()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_watch.stop()
        if self._send_watch is not None:
            self._send_watch.stop()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._sending is not None and self._sending.is_delivered and (exc is not None or self._left_unread):
            self._manners.on_late_departure()
        for sending, (cycle, reception) in self._unanswered.items():
            cycle.disconnected = True
            cycle.message_event.set()
            reception.fail(ClientLeftError("the client left while its body was received"))
            sending.depart()
        self._unanswered.clear()
        self._reception = self._sending = None

    def eof_received(self) -> None:
        # A reset would say so itself; a client that leaves in the middle of a transfer sends an end first.
        self._left_unread = unread_bytes(self.transport) > 0

    def data_received(self, data: bytes | memoryview) -> None:
        had_begun = self._header_began
        if self._reading_header:
            self._header_bytes += len(data)
        super().data_received(data)  # type: ignore[arg-type]
        # Most headers come whole, and need no watch.  Empty lines do: they end the wait for a next request, and
        # begin that for its header.
        if (self._header_began and not had_begun) or not self._unanswered:
            self._header_watch.start()
        if self._reading_header and self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse_long_header()

    def body_received(self, data: memoryview) -> None:
        """Bytes that the parser does not see; where they are `filling`'s they lie in its memory already."""
        self.unparsed -= len(data)
        if self._reception is not None and self._reception.is_filling:
            self._reception.advance(len(data))
        else:
            super().on_body(bytes(data))
        if not self.unparsed:
            self._renew_parser()
            self.on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_header = self._header_began = True

    def on_headers_complete(self) -> None:
        self._reading_header = self._header_began = False
        came, self._header_bytes = self._header_bytes, 0
        self._header_watch.stop()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        # Of another request's read it may have more than came since.
        if came > _MAX_HEADER_BYTES // 2 and self._header_length() > _MAX_HEADER_BYTES:
            self._refuse_long_header()
            return
        super().on_headers_complete()
        # uvicorn has made a task of the application by now, which has not run yet.
        self._attend(self.cycle)

    def _header_length(self) -> int:
        return sum(len(name) + len(value) for name, value in self.headers) + len(self.url)

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reception is not None and self._reception.is_filling:
            self._reception.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        super().on_message_complete()
        if self._reception is not None:
            self._reception.complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError("the request is no well-formed HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._send_watch is not None
        self._send_watch.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._send_watch is not None
        self._send_watch.stop()

    def timeout_keep_alive_handler(self) -> None:
        # Bytes that nobody fetched all this time will not be fetched: closing would wait for them forever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _attend(self, cycle: RequestResponseCycle) -> None:
        """Follow a request's body and response."""
        reception = Reception(announced_bytes(self.headers), functools.partial(self._begin_body, cycle))
        sending = Sending(self.transport, self.loop, cycle)
        cycle.transport = sending  # type: ignore[assignment]
        cycle.on_response = functools.partial(self._end_response, sending)
        cycle.scope["state"].update(reception=reception, sending=sending)
        if (reception.announced or 0) > HEAD_BYTES:
            # The rest of the body is not read before there is a place for it.
            self.flow.pause_reading()
        self._reception, self._sending = reception, sending
        self._unanswered[sending] = cycle, reception

    def _begin_body(self, cycle: RequestResponseCycle) -> bytearray:
        """Let a body come; what came already is handed over."""
        if cycle.waiting_for_100_continue:
            cycle.waiting_for_100_continue = False
            self.transport.write(_CONTINUE)
        early, cycle.body = cycle.body, bytearray()
        if cycle is self.cycle and cycle.more_body:
            assert self._reception is not None
            if self._reception.announced is not None:
                self.unparsed = self._reception.announced - len(early)
            self.flow.resume_reading()
        return early

    def _end_response(self, sending: Sending) -> None:
        sending.finish()
        self._unanswered.pop(sending, None)
        self.on_response_complete()
        if self.pipeline:
            # Each answer would let in another read full of small requests.
            self.flow.pause_reading()
        elif self._refusal is not None and not self._unanswered:
            self._refuse(self._refusal)

    def _renew_parser(self) -> None:
        """The old one waits for a body that it never saw."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _header_is_late(self) -> None:
        if self._header_began:
            self._refuse(RequestTimeoutError("the header was not complete in time"))
        else:
            self.transport.close()

    def _refuse_long_header(self) -> None:
        self._refuse(HeadersTooLargeError(f"the header must be at most {_MAX_HEADER_BYTES} bytes"))

    def _refuse(self, error: NormserveError) -> None:
        """Answer what never became a request, after the answers to those before it, and close."""
        if self.transport.is_closing():
            return
        if self._unanswered and not self.cycle.more_body:
            self._refusal = error
            self.flow.pause_reading()
            return
        # What is wrong with a body is the answer to its request, unless that has been given.
        if not self._unanswered or not self.cycle.response_started:
            self.transport.write(self._manners.refuse(error))
        self.transport.close()
