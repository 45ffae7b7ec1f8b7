"""The heads of requests and answers: written here, read by httptools."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httptools
import httpx

#: The longest head of an answer.
HEAD_BYTES = 64 * 1024

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# What would end a line, or a string in C.
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
    """The bytes before a body.

    Raises:
        httpx.LocalProtocolError: a part of it would be read as something else.
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
    """The head of an answer.

    Attributes:
        status: of its first line.
        headers: by name in lower case; values of one name are joined by commas.
        body_bytes: of the body; None where its end says itself.
        chunk_decoder: reads a body in chunks; None where it is none.
        is_keep_alive: whether the server keeps the connection behind it.
    """

    status: int
    headers: dict[str, str]
    body_bytes: int | None
    chunk_decoder: "ChunkDecoder | None"
    is_keep_alive: bool


class ResponseHeadParser:
    """Reads the heads of one connection's answers.

    One with the same lines as an earlier one is read without the parser. Which lines those are is the server's
    choice, so that no other server's answers count.
    """

    __slots__ = ("_patterns",)

    def __init__(self) -> None:
        # They are tried in turn; one server sends few kinds of heads.
        self._patterns: list[tuple[re.Pattern[str], list[str]]] = []

    def parse(self, raw: bytes) -> ResponseHead:
        """Read a head, the empty line at its end included.

        Raises:
            httpx.RemoteProtocolError: it is none.
        """
        if (as_before := self._parse_by_pattern(raw)) is not None:
            return as_before
        # Most other heads have each name once and a length, and need no Python call for each line.
        quick = _HeaderCollector()
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
                self._add_pattern(raw, quick.headers)
        return ResponseHead(status, headers, length, chunks, stays)

    def _parse_by_pattern(self, raw: bytes) -> ResponseHead | None:
        """Read a head with the same lines as an earlier one, whatever their values; None for any other head."""
        if raw.isascii():
            text = raw.decode("ascii")
            for pattern, names in self._patterns:
                if found := pattern.fullmatch(text):
                    headers = dict(zip(names, found.groups(), strict=True))
                    return ResponseHead(200, headers, int(headers["content-length"]), None, True)
        return None

    def _add_pattern(self, raw: bytes, names: Iterable[bytes]) -> None:
        """Remember the line names of a result's head, if each comes once and none is about the connection."""
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


def _run_parser(protocol: "_HeaderCollector | _MessageCollector", raw: bytes) -> None:
    protocol.parser = httptools.HttpResponseParser(protocol)
    try:
        protocol.parser.feed_data(raw)
    except httptools.HttpParserUpgrade as error:
        raise httpx.RemoteProtocolError("the answer switches to a protocol that was not requested") from error
    except httptools.HttpParserError as error:
        raise httpx.RemoteProtocolError("the header of the answer is not HTTP") from error


class _HeaderCollector:
    """What the parser says of a head, the last of each name."""

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
    """What the parser says of a head, all of it, and of the chunks behind it."""

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
    """Reads a body in chunks.

    Attributes:
        is_complete: whether the last one was read.
        has_excess: whether more came than that, which is nothing that was asked for.
    """

    def __init__(self, found: _MessageCollector) -> None:
        self._collector = found
        self._overhead_bytes = 0
        self.is_complete = False
        self.has_excess = False

    def decode(self, data: bytes) -> bytes:
        """Return what of the body is in the next bytes that came.

        Raises:
            httpx.RemoteProtocolError: they are no chunks, or go on for long without any of the body.
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
        # Extensions and trailers are kept by the parser while they come.
        self._overhead_bytes = 0 if piece else self._overhead_bytes + len(data)
        if self._overhead_bytes > HEAD_BYTES:
            raise httpx.RemoteProtocolError("there are too many bytes between the answer's chunks")
        return piece
