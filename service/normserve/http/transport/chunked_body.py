"""Decoding of chunked bodies: their framing is limited, and trailers are ignored."""

import re

from normserve.errors import HeadersTooLargeError, MalformedHttpError

# Limit of a line that begins a chunk, and of a trailer.
_MAX_LINE_BYTES = 4096
_MAX_TRAILER_BYTES = 16 * 1024
# Besides its data a chunk of one byte takes five bytes, a usual one less than a thousandth of its length.
_FREE_FRAMING_BYTES = 64 * 1024
_FRAMING_BYTES_PER_BYTE = 8

# Fifteen hexadecimal digits stay far below 64 bits.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t -~\x80-\xff]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n")


class ChunkedBodyDecoder:
    """Finds the data in a chunked body.

    It keeps at most one unfinished line, and reads each byte once.  The result depends on the bytes alone, not on
    how they were split in transit.

    Attributes:
        is_complete: whether the last chunk and the trailer section have been received.
        remaining_chunk_bytes: bytes of the current chunk that are still to be received.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.remaining_chunk_bytes = 0
        # Bytes of the line end after a chunk's data that are still to be received.
        self._remaining_line_end = b""
        self._line = b""
        self._in_trailers = False
        self._trailer_bytes = 0
        self._framing_bytes = 0
        self._data_bytes = 0

    def decode(self, received: bytes) -> tuple[bytes, int]:
        """Decode the next bytes; return the data in them, and the number of bytes that belong to this body.

        Raises:
            MalformedHttpError: the bytes are not chunked, or the framing takes too many bytes for the data.
            HeadersTooLargeError: the trailer section is too long.
        """
        pieces: list[bytes] = []
        at, end = 0, len(received)
        while at < end and not self.is_complete:
            if self.remaining_chunk_bytes:
                piece = received[at : at + self.remaining_chunk_bytes]
                pieces.append(piece)
                self.remaining_chunk_bytes -= len(piece)
                at += len(piece)
            elif self._remaining_line_end:
                piece = received[at : at + len(self._remaining_line_end)]
                if not self._remaining_line_end.startswith(piece):
                    raise MalformedHttpError("a chunk's data must end where its size says, with CR LF")
                self._remaining_line_end = self._remaining_line_end[len(piece) :]
                at += len(piece)
            else:
                at = self._consume_line(received, at)
        return b"".join(pieces), at

    def _consume_line(self, received: bytes, at: int) -> int:
        """Process the size line or trailer line at this position; return the position after it.

        An incomplete line is kept until its remaining bytes are received.

        Raises:
            MalformedHttpError: the line is invalid or too long.
            HeadersTooLargeError: the trailer section is too long.
        """
        limit = min(len(received), at + _MAX_LINE_BYTES - len(self._line))
        found = received.find(b"\n", at, limit)
        end = found + 1 if found >= 0 else limit
        line = self._line + received[at:end] if self._line else received[at:end]
        if self._in_trailers and self._trailer_bytes + len(line) > _MAX_TRAILER_BYTES:
            raise HeadersTooLargeError(f"the trailer section must be at most {_MAX_TRAILER_BYTES} bytes")
        if found < 0:
            if len(line) == _MAX_LINE_BYTES:
                raise MalformedHttpError(f"a line within a chunked body must be at most {_MAX_LINE_BYTES} bytes")
            self._line = line
            return end
        self._line = b""
        if self._in_trailers:
            self._consume_trailer_line(line)
        else:
            self._parse_size_line(line)
        return end

    def _parse_size_line(self, line: bytes) -> None:
        """Begin a chunk of the size in this line; a size of 0 begins the trailer section.

        Raises:
            MalformedHttpError: the line is invalid, or the framing takes too many bytes for the data.
        """
        size = _SIZE_LINE.fullmatch(line)
        if size is None:
            raise MalformedHttpError("a chunk must begin with its size in hexadecimal digits and CR LF")
        self.remaining_chunk_bytes = int(size[1], 16)
        # With the line end after the chunk's data.
        self._framing_bytes += len(line) + 2
        self._data_bytes += self.remaining_chunk_bytes
        if self._framing_bytes > _FREE_FRAMING_BYTES + _FRAMING_BYTES_PER_BYTE * self._data_bytes:
            raise MalformedHttpError("the body has too many bytes around the data of its chunks")
        if self.remaining_chunk_bytes:
            self._remaining_line_end = b"\r\n"
        else:
            self._in_trailers = True

    def _consume_trailer_line(self, line: bytes) -> None:
        """Check a line of the trailer section and count its bytes; an empty line completes the body."""
        self._trailer_bytes += len(line)
        if line == b"\r\n":
            self.is_complete = True
        elif not _TRAILER_LINE.fullmatch(line):
            raise MalformedHttpError("a trailer must be a field's name, a colon and a value, and end with CR LF")
