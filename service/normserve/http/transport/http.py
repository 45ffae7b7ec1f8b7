"""The boundaries of headers and bodies in the received bytes.

The parser receives only headers, each exactly to its end.  The bytes between headers are determined by the length
or the chunks that the header announces, whatever its other fields are (for example `Upgrade`).
"""

import re
from typing import Any

import httptools

from normserve.errors import (
    HeadersTooLargeError,
    MalformedHttpError,
    NormserveError,
    OverloadedError,
    TooManyConnectionsError,
)
from normserve.http.transport.chunks import ChunkedBodyDecoder
from normserve.http.transport.exchanges import ConnectionPolicy, ExchangeProtocol
from normserve.http.transport.request_head import SINGULAR, find_head_fault, parse_body_length

PROBES = frozenset({b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready", b"/metrics"})
"""Paths that are answered on connections beyond the limits, too."""

_MAX_HEADER_BYTES = 64 * 1024
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_NO_HTTP = "the request is no well-formed HTTP/1.1"
_find_end = re.compile(rb"\r\n\r\n").search


class HttpParserProtocol(ExchangeProtocol):
    """Parses headers; bodies are received around the parser."""

    def __init__(self, manners: ConnectionPolicy, **of_uvicorn: Any) -> None:
        super().__init__(manners, **of_uvicorn)
        # Of the current header: the number of received bytes, and the last of them, in which its end may begin.
        self._header_bytes = 0
        self._header_tail = b""
        # The last complete header of a request with a body, as long as the parser is at its end.
        self._last_header: bytes | None = None
        self._header_ended = False
        self._singular: dict[bytes, bytes] = {}
        self._repeated: bytes | None = None

    def data_received(self, data: memoryview) -> None:  # type: ignore[override]
        """Process the next received bytes, which are in scratch memory."""
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
                self._ignore(len(rest))
                return
        # Most headers arrive complete and need no timeout.  Empty lines need one: they end the wait for the next
        # request, and begin the wait for its header.
        begins = self._header_began and not had_begun
        if begins or not (
            self._unanswered or self._drain or self.timeout_keep_alive_task or self._header_watch.is_running
        ):
            self._end_idleness()
            self._header_watch.start()

    def _take_announced(self, data: memoryview) -> memoryview:
        length = min(len(data), self.unparsed)
        self.unparsed -= length
        if self._drain is None:
            self.on_body(bytes(data[:length]))
        else:
            self._drain.count(length)
        if not self.unparsed:
            self._end_body()
        return data[length:]

    def _take_chunks(self, chunks: ChunkedBodyDecoder, data: memoryview) -> memoryview:
        try:
            piece, length = chunks.feed(bytes(data))
        except NormserveError as error:
            self.chunks = None
            self._refuse(error)
            return data[:0]
        if self._drain is not None:
            self._drain.count(length)
        elif piece:
            self.on_body(piece)
        if chunks.is_complete:
            self.chunks = None
            self._end_body()
        return data[length:]

    def _take_header(self, data: memoryview) -> memoryview:
        """Take bytes up to the end of a header, or of empty lines before it."""
        end = self._end_of_header(data)
        # Bytes beyond the limit are ignored, so that a refusal does not depend on how bytes arrive.
        piece = bytes(data[: min(end or len(data), _MAX_HEADER_BYTES - self._header_bytes)])
        self._bytes_behind_header = len(data) - end
        if piece == self._last_header:
            self._begin_alike()
            return data[end:]
        if self._last_header is not None:
            # The parser waits for a body that it never receives.
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
                # One of our callbacks failed; the request is valid.
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
        """Begin a request whose header is identical to the last one: the parser is still at its end."""
        headers, url, expects = self.headers.copy(), self.url, self.expect_100_continue
        super().on_message_begin()
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        self._header_watch.stop()
        super().on_headers_complete()
        self._attend(self.cycle, parse_body_length(self._singular))

    def _end_of_header(self, data: memoryview) -> int:
        """The position after the first empty line; 0 if there is none yet."""
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
            fault = find_head_fault(version, self._singular) or self._fault_beyond_limits()
        if fault is not None or not self._header_ended:
            self._refuse(fault or MalformedHttpError(_NO_HTTP))
            return
        if version == "1.0":
            self.expect_100_continue = False
        if not self.url.startswith(b"/"):
            self._name_host_of_target()
        super().on_headers_complete()
        if self.beyond is not None:
            self.cycle.keep_alive = False
        self._header_bytes, self._header_began = 0, False
        # uvicorn has created the application's task by now, which has not run yet.
        self._attend(self.cycle, parse_body_length(self._singular))

    def _fault_beyond_limits(self) -> NormserveError | None:
        """The error of a request that is no probe, on a connection beyond a limit."""
        if self.beyond is None:
            return None
        is_probe = self.url.partition(b"?")[0] in PROBES and self.parser.get_method() in (b"GET", b"HEAD")
        if is_probe and parse_body_length(self._singular) == 0:
            return None
        return TooManyConnectionsError(self.beyond)

    def _name_host_of_target(self) -> None:
        """With `GET http://name/path` the name applies, and not the Host field (RFC 9112, section 3.2.2)."""
        if target := _ABSOLUTE.match(self.url):
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", target[1]))

    def on_message_complete(self) -> None:
        """Do nothing: the parser, which sees no bodies, calls this at the end of a header."""

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedHttpError(_NO_HTTP))
