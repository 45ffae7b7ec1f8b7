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
# What would end a line, or a string in somebody's C.
_NO_VALUE = re.compile(rb"[\0\r\n]")
_NO_TARGET = re.compile(rb"[^!-~]")

_NO_CONTENT = (204, 304)


def request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
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
class AnswerHead:
    """The head of an answer.

    Attributes:
        status, reason: of its first line.
        fields: as they came.
        headers: the same by name in lower case; values of one name are joined by commas.
        length: of the body; None where its end says itself.
        chunks: reads a body in chunks; None where it is none.
        stays: whether the server keeps the connection behind it.
    """

    status: int
    reason: bytes
    fields: list[tuple[bytes, bytes]]
    headers: dict[str, str]
    length: int | None
    chunks: "Chunks | None"
    stays: bool


def read_head(raw: bytes, *, has_body: bool = True) -> AnswerHead:
    """Read a head, the empty line at its end included.

    Args:
        raw: its bytes.
        has_body: whether the request was one whose answer may have a body: not HEAD.

    Raises:
        httpx.RemoteProtocolError: it is none.
    """
    found = _Found()
    found.parser = httptools.HttpResponseParser(found)
    try:
        found.parser.feed_data(raw)
    except httptools.HttpParserUpgrade as error:
        raise httpx.RemoteProtocolError("nobody asked for another protocol") from error
    except httptools.HttpParserError as error:
        raise httpx.RemoteProtocolError("the head of the answer is no HTTP") from error
    status, headers = found.parser.get_status_code(), found.headers
    if not found.is_complete or status < 100:
        raise httpx.RemoteProtocolError("the head of the answer is no HTTP")
    length: int | None = None
    chunks = None
    if not has_body or status < 200 or status in _NO_CONTENT:
        length = 0
    elif "transfer-encoding" in headers:
        if headers["transfer-encoding"].strip().lower() != "chunked":
            raise httpx.RemoteProtocolError("the answer has an unknown transfer encoding")
        chunks = Chunks(found)
    elif "content-length" in headers:
        length = int(headers["content-length"])
    return AnswerHead(status, found.reason, found.fields, headers, length, chunks, found.stays)


class _Found:
    """What the parser says."""

    def __init__(self) -> None:
        self.parser: Any = None
        self.reason = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.stays = False
        self.pieces: list[bytes] = []
        self.messages = 0
        self.ended = 0

    def on_message_begin(self) -> None:
        self.messages += 1

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        # Behind the body they are trailers, which nobody wants.
        if self.is_complete:
            return
        self.fields.append((name, value))
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.stays = self.parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.ended += 1


class Chunks:
    """Reads a body in chunks.

    Attributes:
        is_complete: whether the last one was read.
        has_more: whether more came than that, which is nothing that was asked for.
    """

    def __init__(self, found: _Found) -> None:
        self._found = found
        self._without_body = 0
        self.is_complete = False
        self.has_more = False

    def feed(self, data: bytes) -> bytes:
        """Return what of the body is in the next bytes that came.

        Raises:
            httpx.RemoteProtocolError: they are no chunks, or go on for long without any of the body.
        """
        found = self._found
        try:
            found.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not found.ended:
                raise httpx.RemoteProtocolError("the answer's chunks are none") from error
            self.has_more = True
        self.is_complete = found.ended > 0
        self.has_more = self.has_more or found.messages > 1
        piece, found.pieces = b"".join(found.pieces), []
        # Extensions and trailers are kept by the parser while they come.
        self._without_body = 0 if piece else self._without_body + len(data)
        if self._without_body > HEAD_BYTES:
            raise httpx.RemoteProtocolError("there is too much between the answer's chunks")
        return piece
