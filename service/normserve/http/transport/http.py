"""uvicorn's httptools protocol, with the limits and the manners that it lacks, and bodies that bypass it.

The parser sees headers and nothing else, each exactly to its end: what lies between headers is found by the length
or the chunks that the header announced, whatever else it says (`Upgrade`, say).
"""

import asyncio
import functools
import re
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
    OverloadedError,
    RequestTimeoutError,
)
from normserve.http.transport.chunks import ChunkedBody
from normserve.http.transport.half_closed import HalfClosedWatch, tells_departures
from normserve.http.transport.patience import HeaderWatch, Patience, SendWatch
from normserve.http.transport.reception import Reception
from normserve.http.transport.request_head import SINGULAR, body_bytes, fault_in
from normserve.http.transport.sending import TLS_PORTION_BYTES, Sending, unread_bytes

# Read at once while a header is expected: enough for it and a small body, and little enough that of a large body,
# whose first bytes come along and must be copied, most goes straight to its place.
HEAD_BYTES = 16 * 1024
_MAX_HEADER_BYTES = 64 * 1024
_UNIX_BUFFER_BYTES = 4 * 2**20
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_TLS_END_S = 0.2
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_HTTP = "the request is no well-formed HTTP/1.1"
_find_end = re.compile(rb"\r\n\r\n").search


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
    """Parses headers; bodies are received around the parser.

    Attributes:
        unparsed: bytes still to come of a body of announced length.
        chunks: a chunked body that is arriving.
    """

    def __init__(self, manners: Manners, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._manners = manners
        # Of the header that is arriving: how much of it came, and the last bytes, in which its end may begin.
        self._header_bytes = 0
        self._header_tail = b""
        # The last whole one of a request with a body, as long as the parser stands at its end.
        self._last_header: bytes | None = None
        self._header_began = False
        self._header_ended = False
        self._singular: dict[bytes, bytes] = {}
        self._repeated: bytes | None = None
        self._header_watch = HeaderWatch(self.loop, manners.patience, self._header_is_late)
        self._send_watch: SendWatch | None = None
        self._half_closed_watch: HalfClosedWatch | None = None
        self._reception: Reception | None = None
        self._sending: Sending | None = None
        # Requests whose answer is not out: the one that is worked on, and those pipelined behind it.
        self._unanswered: dict[Sending, tuple[RequestResponseCycle, Reception]] = {}
        self._refusal: NormserveError | None = None
        self._left_unread = False
        self._is_encrypted = False
        self.unparsed = 0
        self.chunks: ChunkedBody | None = None

    @property
    def filling(self) -> Reception | None:
        """The body whose next bytes belong straight into its memory, if there is one."""
        reception = self._reception
        return reception if self.unparsed and reception is not None and reception.is_filling else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            # TCP grows its buffers by itself, up to about this.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        super().connection_made(transport)
        # Paused means that anything is unsent, and resumed that the kernel has all of it.  uvloop's TLS pauses at
        # its limit already, and hands what it encrypted to a transport that holds a write or two of its own.  The
        # end of its handshake may be unsent now.
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None
        unseen = TLS_PORTION_BYTES if self._is_encrypted else 0
        self._send_watch = SendWatch(self.loop, self._manners.patience, transport, unseen_bytes=unseen)
        transport.set_write_buffer_limits(1 if self._is_encrypted else 0)
        self._header_watch.start()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_watch.stop()
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
        self._unanswered.clear()
        self._reception = self._sending = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether it may still read the answers to what it has sent whole."""
        # A reset would say so itself; a client that leaves in the middle of a transfer sends an end first.
        self._left_unread = unread_bytes(self.transport) > 0
        whole = [cycle for cycle, _ in self._unanswered.values() if not cycle.more_body]
        if not whole or self.scheme == "https":
            return False
        if self._refusal is None:
            whole[-1].keep_alive = False
        if self._half_closed_watch is None:
            if not tells_departures(self.transport):
                next(iter(self._unanswered)).probe()
            self._half_closed_watch = HalfClosedWatch(self.loop, self.transport)
        return True

    def data_received(self, data: memoryview) -> None:  # type: ignore[override]
        """What came next, in scratch memory."""
        self._unset_keepalive_if_required()
        had_begun = self._header_began
        rest = data
        while len(rest):
            if self.unparsed:
                rest = self._take_announced(rest)
            elif self.chunks is not None:
                rest = self._take_chunks(self.chunks, rest)
            elif self._takes_requests:
                rest = self._take_header(rest)
            else:
                return
        # Most headers come whole, and need no watch.  Empty lines do: they end the wait for a next request, and
        # begin that for its header.
        begins = self._header_began and not had_begun
        if begins or not (self._unanswered or self._header_watch.is_running):
            self._header_watch.start()

    @property
    def _takes_requests(self) -> bool:
        """Whether what comes next can still become one."""
        if self._refusal is not None or self.transport.is_closing():
            return False
        return self.cycle is None or self.cycle.keep_alive

    def filled(self, nbytes: int) -> None:
        """So many bytes came into the memory of `filling`."""
        assert self._reception is not None
        self.unparsed -= nbytes
        self._reception.advance(nbytes)
        if not self.unparsed:
            self._end_body()

    def _take_announced(self, data: memoryview) -> memoryview:
        length = min(len(data), self.unparsed)
        self.unparsed -= length
        self.on_body(bytes(data[:length]))
        if not self.unparsed:
            self._end_body()
        return data[length:]

    def _take_chunks(self, chunks: ChunkedBody, data: memoryview) -> memoryview:
        try:
            piece, length = chunks.feed(bytes(data))
        except NormserveError as error:
            self.chunks = None
            self._refuse(error)
            return data[:0]
        if piece:
            self.on_body(piece)
        if chunks.is_complete:
            self.chunks = None
            self._end_body()
        return data[length:]

    def _take_header(self, data: memoryview) -> memoryview:
        """Take bytes up to the end of a header, or of empty lines before it."""
        end = self._end_of_header(data)
        # Beyond the limit nothing is looked at, so that what is refused does not depend on how bytes arrive.
        piece = bytes(data[: min(end or len(data), _MAX_HEADER_BYTES - self._header_bytes)])
        if piece == self._last_header:
            self._begin_alike()
            return data[end:]
        if self._last_header is not None:
            # The parser waits for a body that it will never see.
            self.parser = httptools.HttpRequestParser(self)
            self._last_header = None
        came_before = self._header_bytes
        self._header_bytes += len(piece)
        self._header_ended = 0 < len(piece) == end
        upgrades = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            upgrades = True
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MemoryError):
                # A callback of ours failed, and not the request.
                self._refuse(OverloadedError("there is no memory for a request now"))
            else:
                self.send_400_response("")
            return data[:0]
        if self._header_ended:
            self._header_tail = b""
            if self._header_began:
                self.send_400_response("")
            elif upgrades or self.chunks is not None or (self.unparsed and came_before):
                self.parser = httptools.HttpRequestParser(self)
            elif self.unparsed:
                self._last_header = piece
        elif len(piece) < len(data):
            self._refuse(HeadersTooLargeError(f"the header must be at most {_MAX_HEADER_BYTES} bytes"))
        else:
            self._header_tail = (self._header_tail + piece[-3:])[-3:]
        return data[len(piece) :]

    def _begin_alike(self) -> None:
        """A header came that is the last one's, byte for byte: the parser still stands at its end."""
        headers, url, expects = self.headers.copy(), self.url, self.expect_100_continue
        super().on_message_begin()
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        self._header_watch.stop()
        super().on_headers_complete()
        self._attend(self.cycle)

    def _end_of_header(self, data: memoryview) -> int:
        """Where the first empty line ends; 0 if it is not there yet."""
        if (tail := self._header_tail) and (found := _find_end(tail + bytes(data[:3]))):
            return found.end() - len(tail)
        found = _find_end(data)
        return found.end() if found else 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_began = True
        self._singular, self._repeated = {}, None

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in SINGULAR:
            if name in self._singular:
                self._repeated = name
            value = self._singular[name] = value.strip(b" \t")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._header_watch.stop()
        version = self.parser.get_http_version()
        if self._repeated is not None:
            fault: NormserveError | None = MalformedHttpError(f"{self._repeated.decode()} must be given once")
        else:
            fault = fault_in(version, self._singular)
        if fault is not None or not self._header_ended:
            self._refuse(fault or MalformedHttpError(_NO_HTTP))
            return
        if version == "1.0":
            self.expect_100_continue = False
        if not self.url.startswith(b"/"):
            self._name_host_of_target()
        super().on_headers_complete()
        self._header_bytes, self._header_began = 0, False
        # uvicorn has made a task of the application by now, which has not run yet.
        self._attend(self.cycle)

    def _name_host_of_target(self) -> None:
        """Of `GET http://name/path` the name counts, and not what Host says (RFC 9112, section 3.2.2)."""
        if target := _ABSOLUTE.match(self.url):
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", target[1]))

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reception is not None and self._reception.is_filling:
            self._reception.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser's word for the end of a header: of bodies it knows nothing."""

    def _end_body(self) -> None:
        """The request is whole."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
        if self._reception is not None:
            self._reception.complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError(_NO_HTTP))

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._send_watch is not None
        # Those before it are out, and those behind it wait for it.
        self._send_watch.start(next(iter(self._unanswered), None))

    def resume_writing(self) -> None:
        super().resume_writing()
        assert self._send_watch is not None
        self._send_watch.stop()

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_encrypted and self.transport.is_closing():
            self.loop.call_later(_TLS_END_S, self._end_tls)

    def _end_tls(self) -> None:
        """An idle client may never answer that TLS ends, and need not."""
        if self.transport.get_extra_info("socket") is not None and not unread_bytes(self.transport):
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        # Bytes that nobody fetched all this time will not be fetched: closing would wait for them forever.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _attend(self, cycle: RequestResponseCycle) -> None:
        """Follow a request's body and response."""
        announced = body_bytes(self._singular)
        reception = Reception(announced, functools.partial(self._begin_body, cycle))
        sending = Sending(self.transport, self.loop, cycle, is_encrypted=self._is_encrypted)
        cycle.transport = sending  # type: ignore[assignment]
        cycle.on_response = functools.partial(self._end_response, sending)
        cycle.send_500_response = sending.cut_off  # type: ignore[method-assign]
        cycle.scope["state"].update(reception=reception, sending=sending)
        self._reception, self._sending = reception, sending
        self._unanswered[sending] = cycle, reception
        if announced is None:
            self.chunks = ChunkedBody()
        elif announced == 0:
            self._end_body()
        else:
            self.unparsed = announced
            if announced > HEAD_BYTES:
                # The rest of the body is not read before there is a place for it.
                self.flow.pause_reading()

    def _begin_body(self, cycle: RequestResponseCycle) -> bytearray:
        """Let a body come; what came already is handed over."""
        early, cycle.body = cycle.body, bytearray()
        if cycle.more_body:
            if cycle.waiting_for_100_continue:
                self.transport.write(_CONTINUE)
            self.flow.resume_reading()
        cycle.waiting_for_100_continue = False
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

    def _header_is_late(self) -> None:
        if self._header_began:
            self._refuse(RequestTimeoutError("the header was not complete in time"))
        else:
            self.transport.close()

    def _refuse(self, error: NormserveError) -> None:
        """Answer what never became a request, after the answers to those before it, and close."""
        if self.transport.is_closing():
            return
        self._header_began = False
        self._header_watch.stop()
        # What is wrong with a body is the answer to its request, unless that has been given.
        cycle = self.cycle if self._unanswered and self.cycle.more_body else None
        if cycle is not None and len(self._unanswered) > 1:
            # It has not begun: those before it are answered first.
            self.pipeline.popleft()
            self._unanswered.popitem()
            cycle = None
        if self._unanswered and cycle is None:
            self._refusal = error
            self.flow.pause_reading()
            return
        if cycle is None or not cycle.response_started:
            self.transport.write(self._manners.refuse(error))
        self.transport.close()
