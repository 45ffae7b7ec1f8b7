"""The heads of requests and responses: encoded here, parsed by httptools."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httptools
import httpx

#: Bytes of the longest head of a response.
HEAD_BYTES = 64 * 1024

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Bytes that would end a line, or a string in C.
_NO_VALUE = re.compile(rb"[\0\r\n]")
_NO_TARGET = re.compile(rb"[^!-~]")

_NO_CONTENT = (204, 304)

_RESULT = b"HTTP/1.1 200 OK\r\n"
# Printable, and no blank at an end.
_VALUE = "[!-~](?:[ -~]*[!-~])?"
_LENGTH = "0|[1-9][0-9]{0,14}"
# Headers that change how the connection is read.
_OF_CONNECTIONS = frozenset(["connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"])


def encode_request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode the request line and the headers.

    Raises:
        httpx.LocalProtocolError: a part is invalid and would change the meaning of the head.
    """
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    if not _NAME.fullmatch(method) or not target or _NO_TARGET.search(target):
        raise httpx.LocalProtocolError("a request's method and target must be printable ASCII without blanks")
    for name, value in headers:
        if not _NAME.fullmatch(name) or _NO_VALUE.search(value):
            raise httpx.LocalProtocolError("a header must be a name and a value of one line")
        lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


@dataclass(slots=True)
class ResponseHead:
    """The parsed status line and headers of a response, and the state of reading its body.

    Attributes:
        status: that of the status line.
        headers: by name in lower case; values of one name are joined by commas.
        remaining_body_bytes: bytes of the body that are still to be received, at first its length; None where the
            head does not state it.
        chunk_decoder: decodes a chunked body; None for any other body.
        is_keep_alive: whether the server keeps the connection open after the response.
    """

    status: int
    headers: dict[str, str]
    remaining_body_bytes: int | None
    chunk_decoder: "ChunkDecoder | None"
    is_keep_alive: bool


class ResponseHeadParser:
    """A parser of the response heads of one connection.

    A head with the same header names as an earlier one is matched by a pattern, without httptools.  The server
    chooses these names, so each connection has patterns of its own.
    """

    __slots__ = ("_patterns",)

    def __init__(self) -> None:
        # They are tried in turn; one server sends few kinds of heads.
        self._patterns: list[tuple[re.Pattern[str], list[str]]] = []

    def parse(self, raw: bytes) -> ResponseHead:
        """Parse a response head, which includes the empty line at its end.

        Raises:
            httpx.RemoteProtocolError: the bytes are no head of a response.
        """
        if (as_before := self._parse_by_pattern(raw)) is not None:
            return as_before
        # Most other heads have each name once and a length, and need no Python call for each line.
        quick = _UniqueHeaderCollector()
        _run_parser(quick, raw)
        headers = {_decode_lower(name): value.decode("latin-1") for name, value in quick.headers.items()}
        stays, found = quick.is_keep_alive, None
        if raw.count(b"\r\n") != len(headers) + 2 or "transfer-encoding" in headers:
            found = _MessageCollector()
            _run_parser(found, raw)
            headers = {}
            for name, value in found.headers:
                key, text = _decode_lower(name), value.decode("latin-1")
                headers[key] = f"{headers[key]}, {text}" if key in headers else text
        status: int = quick.parser.get_status_code()
        if not quick.is_complete or status < 100:
            raise httpx.RemoteProtocolError("the header of the answer is not HTTP")
        length: int | None = None
        chunks = None
        if status < 200 or status in _NO_CONTENT:
            length = 0
        elif found is not None and "transfer-encoding" in headers:
            if headers["transfer-encoding"].strip().lower() != "chunked":
                raise httpx.RemoteProtocolError("the answer has an unknown transfer encoding")
            chunks = ChunkDecoder(found)
        elif "content-length" in headers:
            length = int(headers["content-length"])
            if found is None and stays:
                self._try_add_pattern(raw, quick.headers)
        return ResponseHead(status, headers, length, chunks, stays)

    def _parse_by_pattern(self, raw: bytes) -> ResponseHead | None:
        """Parse a head with a regular expression that was made from an earlier head with the same header names.
        Return None if no stored expression matches.
        """
        if raw.isascii():
            text = raw.decode("ascii")
            for pattern, names in self._patterns:
                if found := pattern.fullmatch(text):
                    headers = dict(zip(names, found.groups(), strict=True))
                    return ResponseHead(200, headers, int(headers["content-length"]), None, True)
        return None

    def _try_add_pattern(self, raw: bytes, names: Iterable[bytes]) -> None:
        """Store a pattern that matches later heads with the same header names, to parse those quickly.

        Only heads with status 200 are stored, and none with a repeated header or one that controls the
        connection.
        """
        if len(self._patterns) >= _MOST_PATTERNS or not raw.startswith(_RESULT) or len(raw) > _LONGEST_LEARNT:
            return
        keys = [_decode_lower(name) for name in names]
        if "content-length" not in keys or not _OF_CONNECTIONS.isdisjoint(keys):
            return
        lines = [
            f"{re.escape(name.decode('latin-1'))}: ({_LENGTH if key == 'content-length' else _VALUE})\r\n"
            for name, key in zip(names, keys, strict=True)
        ]
        pattern = re.compile(f"{re.escape(_RESULT.decode('ascii'))}{''.join(lines)}\r\n")
        if pattern.fullmatch(raw.decode("latin-1")):
            self._patterns.append((pattern, keys))


_MOST_PATTERNS, _LONGEST_LEARNT = 4, 2048


def _decode_lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _run_parser(collector: "_UniqueHeaderCollector | _MessageCollector", raw: bytes) -> None:
    """Parse a head with a new httptools parser, which calls the callbacks of a collector.

    Raises:
        httpx.RemoteProtocolError: the head is not HTTP, or switches to another protocol.
    """
    collector.parser = httptools.HttpResponseParser(collector)
    try:
        collector.parser.feed_data(raw)
    except httptools.HttpParserUpgrade as error:
        raise httpx.RemoteProtocolError("the answer switches to a protocol that was not requested") from error
    except httptools.HttpParserError as error:
        raise httpx.RemoteProtocolError("the header of the answer is not HTTP") from error


class _UniqueHeaderCollector:
    """Callbacks of httptools that collect headers by name, for heads in which no name repeats.

    They call no Python code for each header, and keep only the last value of a repeated name.
    """

    def __init__(self) -> None:
        self.parser: Any = None
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = False
        self.is_keep_alive = False
        self.on_header = self.headers.__setitem__

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.is_keep_alive = self.parser.should_keep_alive()


class _MessageCollector:
    """Callbacks of httptools that collect all headers and the body, for repeated headers and chunked bodies."""

    def __init__(self) -> None:
        self.parser: Any = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self.pieces: list[bytes] = []
        self.message_count = 0
        self.ended_count = 0

    def on_message_begin(self) -> None:
        self.message_count += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        # Behind the body they are trailers, which are not read.
        if not self.is_complete:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.ended_count += 1


class ChunkDecoder:
    """A decoder of a response body in HTTP's chunked transfer encoding.

    Attributes:
        is_complete: whether the last chunk was decoded.
        has_excess: whether unrequested bytes follow the last chunk.
    """

    def __init__(self, found: _MessageCollector) -> None:
        self._collector = found
        self._overhead_bytes = 0
        self.is_complete = False
        self.has_excess = False

    def decode(self, data: bytes) -> bytes:
        """Decode the next received bytes, and return the bytes of the body among them.

        Raises:
            httpx.RemoteProtocolError: the chunks are malformed, or have too many bytes between them.
        """
        found = self._collector
        try:
            found.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not found.ended_count:
                raise httpx.RemoteProtocolError("the answer's chunks are malformed") from error
            self.has_excess = True
        self.is_complete = found.ended_count > 0
        self.has_excess = self.has_excess or found.message_count > 1
        piece, found.pieces = b"".join(found.pieces), []
        # The parser buffers extensions and trailers while it receives them.
        self._overhead_bytes = 0 if piece else self._overhead_bytes + len(data)
        if self._overhead_bytes > HEAD_BYTES:
            raise httpx.RemoteProtocolError("there are too many bytes between the answer's chunks")
        return piece
