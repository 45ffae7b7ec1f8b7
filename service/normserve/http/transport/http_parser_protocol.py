"""The parsing of request headers, and the boundaries of headers and bodies in the received bytes.

The parser receives only headers, each exactly to its end.  The bytes between headers are determined by the length
or the chunks that the header announces, whatever its other fields are (for example `Upgrade`).  Header fields are
validated before anything else uses them.
"""

import re
from collections.abc import Mapping
from typing import Any

import httptools

from normserve.codec.forwarded_for import FORWARDED_FOR
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.errors import (
    HeadersTooLargeError,
    MalformedHttpError,
    NormserveError,
    OverloadedError,
    TooManyConnectionsError,
    UnsupportedTransferEncodingError,
)
from normserve.http.transport.chunked_body import ChunkedBodyDecoder
from normserve.http.transport.exchange_protocol import ConnectionPolicy, ExchangeProtocol

_SINGULAR = frozenset({b"authorization", b"content-length", b"host", b"transfer-encoding"})
"""Fields that must not be repeated, as two parsers of one header could see different requests."""

PROBES = frozenset({b"/livez", b"/readyz", b"/v2/health/live", b"/v2/health/ready", b"/metrics"})
"""Paths that are answered even on connections beyond the limits."""

_MAX_HEADER_BYTES = 64 * 1024
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_NO_HTTP = "the request is no well-formed HTTP/1.1"
_find_end = re.compile(rb"\r\n\r\n").search


class HttpParserProtocol(ExchangeProtocol):
    """A connection that splits the received bytes into headers and bodies; httptools parses the headers."""

    def __init__(self, policy: ConnectionPolicy, **of_uvicorn: Any) -> None:
        super().__init__(policy, **of_uvicorn)
        # Of the current header: the number of received bytes, and the last of them, in which its end may begin.
        self._header_bytes = 0
        self._header_tail = b""
        # The last complete header of a request with a body, as long as the parser is at its end.
        self._last_header: bytes | None = None
        self._is_header_complete = False
        self._unrepeatable_fields: dict[bytes, bytes] = {}
        self._repeated_field: bytes | None = None

    def data_received(self, data: memoryview) -> None:  # type: ignore[override]
        """Process the next received bytes, which are in scratch memory."""
        self._unset_keepalive_if_required()
        had_begun = self._is_header_open
        rest = data
        while len(rest):
            if self.remaining_body_bytes:
                rest = self._consume_sized_body(rest)
            elif self.chunked_decoder is not None:
                rest = self._consume_chunked_body(self.chunked_decoder, rest)
            elif self._is_accepting_requests:
                rest = self._consume_header(rest)
            else:
                self._ignore_bytes(len(rest))
                return
        # Most headers arrive complete and need no timeout.  Empty lines need one: they end the wait for the next
        # request, and begin the wait for its header.
        begins = self._is_header_open and not had_begun
        if begins or not (
            self._open_exchanges
            or self._body_discard
            or self.timeout_keep_alive_task
            or self._header_timer.is_running
        ):
            self._mark_busy()
            self._header_timer.start()

    def _consume_sized_body(self, data: memoryview) -> memoryview:
        """Process the bytes of `data` that belong to a body of announced length; return the bytes after it."""
        length = min(len(data), self.remaining_body_bytes)
        self.remaining_body_bytes -= length
        if self._body_discard is None:
            self.on_body(bytes(data[:length]))
        else:
            self._body_discard.count_bytes(length)
        if not self.remaining_body_bytes:
            self._complete_body()
        return data[length:]

    def _consume_chunked_body(self, chunks: ChunkedBodyDecoder, data: memoryview) -> memoryview:
        """Decode the bytes of `data` that belong to a chunked body; return the bytes after it.

        Invalid bytes are refused with an error, and none remain.
        """
        try:
            piece, length = chunks.decode(bytes(data))
        except NormserveError as error:
            self.chunked_decoder = None
            self._refuse_input(error)
            return data[:0]
        if self._body_discard is not None:
            self._body_discard.count_bytes(length)
        elif piece:
            self.on_body(piece)
        if chunks.is_complete:
            self.chunked_decoder = None
            self._complete_body()
        return data[length:]

    def _consume_header(self, data: memoryview) -> memoryview:
        """Parse the bytes of `data` up to the end of a header; return the bytes after it.

        If the header is incomplete, all bytes are parsed.  Invalid bytes are refused with an error.
        """
        end = self._find_header_end(data)
        # Bytes beyond the limit are ignored, so that a refusal does not depend on how bytes arrive.
        piece = bytes(data[: min(end or len(data), _MAX_HEADER_BYTES - self._header_bytes)])
        self._bytes_after_header = len(data) - end
        if piece == self._last_header:
            self._begin_identical_request()
            return data[end:]
        if self._last_header is not None:
            # The parser waits for a body that it never receives.
            self.parser = httptools.HttpRequestParser(self)
            self._last_header = None
        earlier_header_bytes = self._header_bytes
        self._header_bytes += len(piece)
        self._is_header_complete = 0 < len(piece) == end
        upgrades = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            upgrades = True
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MemoryError):
                # One of our callbacks failed; the request is valid.
                self._refuse_input(OverloadedError("there is no memory for a request now"))
            else:
                self.send_400_response("")
            return data[:0]
        if self._is_header_complete:
            self._header_tail = b""
            if self._is_header_open:
                self.send_400_response("")
            elif (
                upgrades or self.chunked_decoder is not None or (self.remaining_body_bytes and earlier_header_bytes)
            ):
                self.parser = httptools.HttpRequestParser(self)
            elif self.remaining_body_bytes:
                self._last_header = piece
        elif len(piece) < len(data):
            self._refuse_input(HeadersTooLargeError(f"the header must be at most {_MAX_HEADER_BYTES} bytes"))
        else:
            self._header_tail = (self._header_tail + piece[-3:])[-3:]
        return data[len(piece) :]

    def _begin_identical_request(self) -> None:
        """Begin a request whose header has the same bytes as the last one, without parsing them again."""
        headers, url, expects = self.headers.copy(), self.url, self.expect_100_continue
        client = self.scope["client"]
        super().on_message_begin()
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        self.scope["client"] = client
        self._header_timer.stop()
        super().on_headers_complete()
        self._begin_exchange(self.cycle, _parse_body_length(self._unrepeatable_fields))

    def _find_header_end(self, data: memoryview) -> int:
        """Return the position after the first empty line; 0 if there is none yet."""
        if (tail := self._header_tail) and (found := _find_end(tail + bytes(data[:3]))):
            return found.end() - len(tail)
        found = _find_end(data)
        return found.end() if found else 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_header_open = True
        self._unrepeatable_fields, self._repeated_field = {}, None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header field, and note `Expect: 100-continue`.

        The field that only the server's own gateway may send is dropped from other clients' requests.

        A repeated field is noted if it must not be repeated; `on_headers_complete` then refuses the
        request.
        """
        name = name.lower()
        if name in _SINGULAR:
            if name in self._unrepeatable_fields:
                self._repeated_field = name
            value = self._unrepeatable_fields[name] = value.strip(b" \t")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == GATEWAY_CALLER and not self.is_from_own_user:
            return
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Begin the request; refuse it if the header is invalid or the connection is beyond a limit."""
        self._header_timer.stop()
        version = self.parser.get_http_version()
        if (root_path := self._policy.root_path) and self.url.startswith(root_path + b"/"):
            self.url = self.url[len(root_path) :]
        if self._repeated_field is not None:
            fault: NormserveError | None = MalformedHttpError(f"{self._repeated_field.decode()} must be given once")
        else:
            fault = find_head_fault(version, self._unrepeatable_fields) or self._find_connection_limit_error()
        if fault is not None or not self._is_header_complete:
            self._refuse_input(fault or MalformedHttpError(_NO_HTTP))
            return
        if version == "1.0":
            self.expect_100_continue = False
        if not self.url.startswith(b"/"):
            self._set_host_from_target()
        if self._policy.proxies is not None and self.client is not None:
            values = [value for name, value in self.headers if name == FORWARDED_FOR]
            if values:
                self.scope["client"] = self._policy.proxies.find_client_address(self.client[0], values), 0
        super().on_headers_complete()
        if self.exceeded_limit is not None:
            self.cycle.keep_alive = False
        self._header_bytes, self._is_header_open = 0, False
        # uvicorn has created the application's task by now, which has not run yet.
        self._begin_exchange(self.cycle, _parse_body_length(self._unrepeatable_fields))

    def _find_connection_limit_error(self) -> NormserveError | None:
        """Return the error for a request if its connection exceeds a limit on the number of connections.

        Return None within all limits, and for a probe.
        """
        if self.exceeded_limit is None:
            return None
        is_probe = self.url.partition(b"?")[0] in PROBES and self.parser.get_method() in (b"GET", b"HEAD")
        if is_probe and _parse_body_length(self._unrepeatable_fields) == 0:
            return None
        return TooManyConnectionsError(self.exceeded_limit)

    def _set_host_from_target(self) -> None:
        """Replace the Host field by the host of a target like `http://name/path` (RFC 9112, section 3.2.2)."""
        if target := _ABSOLUTE.match(self.url):
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", target[1]))

    def on_message_complete(self) -> None:
        """Do nothing: the parser, which sees no bodies, calls this at the end of a header."""

    def send_400_response(self, msg: str) -> None:
        self._refuse_input(MalformedHttpError(_NO_HTTP))


def find_head_fault(version: str, unrepeatable_fields: Mapping[bytes, bytes]) -> NormserveError | None:
    """Return the error of a header that the parser accepts but the server refuses; None if it is valid.

    Args:
        version: the HTTP version, as in "1.1".
        unrepeatable_fields: the request's fields that may appear once, by lower-case name.
    """
    if version != "1.1" and version != "1.0":
        return MalformedHttpError("this server speaks HTTP/1.1 and HTTP/1.0")
    if b"host" not in unrepeatable_fields and version == "1.1":
        return MalformedHttpError("an HTTP/1.1 request must have a Host field")
    coding = unrepeatable_fields.get(b"transfer-encoding")
    if coding is None:
        return None
    if version == "1.0" or b"content-length" in unrepeatable_fields:
        return MalformedHttpError("Transfer-Encoding is allowed in HTTP/1.1 only, and not with Content-Length")
    coding = coding.lower()
    if coding.rpartition(b",")[2].strip(b" \t") != b"chunked":
        return MalformedHttpError("the last transfer coding must be chunked, which marks the end of the body")
    if coding != b"chunked":
        return UnsupportedTransferEncodingError("the only supported transfer coding is chunked")
    return None


def _parse_body_length(unrepeatable_fields: Mapping[bytes, bytes]) -> int | None:
    """Return the announced body length of a valid request, in bytes; None if the body is chunked."""
    if b"transfer-encoding" in unrepeatable_fields:
        return None
    return int(unrepeatable_fields.get(b"content-length", 0))
