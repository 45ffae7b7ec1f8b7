"""One HTTP/1.1 connection, without waiting: who drives it waits.

What takes time is a generator: it yields a descriptor and the events of `select.poll` that it waits for, is sent
those that came, and returns its result.  So threads and event loops drive the same code, over sockets that never
block.  A body is sent from where it lies, and an answer of known length received into memory of its own, one copy
each, in the kernel.
"""

import socket
import ssl
import time
from collections.abc import Sequence

import httpx
import numpy as np

from normserve.client.answers.answer import ApiResponse
from normserve.client.answers.reception import LimitedBody
from normserve.client.http.heads import HEAD_BYTES, ResponseHead, ResponseHeadParser
from normserve.client.http.parts import coalesce_small, drop_sent
from normserve.client.http.receiving import NOW, TURN_BYTES, BlockingReceive, SocketReceiver
from normserve.client.http.steps import READ, WRITE, Steps

# Of a body that comes in pieces.
_PIECE_BYTES = 256 * 1024
# Of a request, with one call.
_MOST_PARTS = 64

_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError)


class ClientHttpConnection(SocketReceiver):
    """An open connection, used by one exchange at a time.

    Attributes:
        is_reusable: whether the last exchange left it so that another may follow.
        has_answered: whether a byte of an answer to the last request came.
        idle_since: when it was last used, by time.monotonic.
    """

    def __init__(self, connected: socket.socket, *, blocks: bool = False) -> None:
        """Args:
        connected: does not block, and has done its handshake.
        blocks: that it does block after all, sending not for long (SO_SNDTIMEO): who has a thread to spare need not
            be woken for each part that the socket takes.
        """
        super().__init__(connected)
        self.is_reusable = True
        self.idle_since = time.monotonic()
        self._send_flags = 0 if blocks else NOW
        self._head_parser = ResponseHeadParser()
        # Of the parts of a request, by the first call.
        self._sent_at_once = 0

    def close(self) -> None:
        """Close it."""
        self.is_reusable = False
        self._socket.close()

    def exchange(
        self,
        head: bytes,
        parts: Sequence[bytes | memoryview],
        most_bytes: int,
        room: memoryview | None = None,
        fill: BlockingReceive | None = None,
    ) -> Steps[ApiResponse]:
        """Send a request and return its answer.

        Args:
            head, parts: of the request.
            most_bytes: what the body of a successful answer can have; an error's is left out if it is too long.
            room: memory for the body, used if that has a length and fits; None always makes new memory.
            fill: receives the answer of a socket that blocks, for who may block the thread.

        Raises:
            UnexpectedAnswerError: the answer is longer than that, or compressed.
            httpx.TransportError: there is none, or the answer is not HTTP.
        """
        sent = yield from self.send_request([head, *parts])
        answer = yield from self.receive_head(fill)
        status, headers = answer.status, answer.headers
        length, reception = answer.body_bytes, None
        # What is as it should be needs no second look.
        if status >= 400 or length is None or length > most_bytes or "content-encoding" in headers:
            reception = LimitedBody(status, headers, most_bytes)
        if length is not None and (reception is None or reception.is_wanted):
            if room is None or len(room) < length:
                # Not cleared before it is filled, which a bytearray would be.
                room = np.empty(length, np.uint8).data
            body = room[:length]
            yield from self._receive_exactly(body, fill)
            self.end_response(answer, sent)
            return ApiResponse(status, headers, body)
        reception = reception or LimitedBody(status, headers, most_bytes)
        while reception.is_wanted:
            piece = yield from self.receive_piece(answer)
            if piece is None:
                self.end_response(answer, sent)
                break
            reception.append(piece)
        return ApiResponse(status, headers, reception.get_body())

    def send_request(self, parts: Sequence[bytes | memoryview]) -> Steps[bool]:
        """Send these one after another; return whether all of it went, and not an answer came before.

        A server that refuses a request need not read it: what it says is more than that it no longer listens.
        """
        self.is_reusable = self.has_answered = False
        self._send_error = None
        turn = 0
        try:
            if not self._is_tls and self._send_without_waiting(parts):
                return True
            views = [memoryview(part).cast("B") for part in parts if len(part)]
            if self._is_tls:
                views = coalesce_small(views)
            else:
                drop_sent(views, self._sent_at_once)
            while views:
                try:
                    sent = self._send_some(views)
                except ssl.SSLWantReadError:
                    yield self._descriptor, READ
                    continue
                except _LATER:
                    turn = TURN_BYTES
                else:
                    drop_sent(views, sent)
                    # Of a socket that took a part there is nothing more to ask for now.
                    turn = turn + sent if self._is_tls else TURN_BYTES
                if turn >= TURN_BYTES and views:
                    turn = 0
                    came = yield self._descriptor, READ | WRITE
                    if came & ~WRITE and self._receive_early_response():
                        return False
        except OSError as error:
            self._send_error = error
            return False
        return True

    def receive_head(self, fill: BlockingReceive | None = None) -> Steps[ResponseHead]:
        """Receive an answer's head; interim ones before it are left out.

        Args: fill: as in `exchange`.
        """
        while True:
            raw = self._take_head()
            while raw is None and self._end - self._begin <= HEAD_BYTES:
                yield from self._receive_to_buffer(fill)
                raw = self._take_head()
            if raw is None or len(raw) > HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"an answer's header must be at most {HEAD_BYTES} bytes")
            head = self._head_parser.parse(raw)
            if head.status >= 200:
                return head
            # A server may send these faster than they are read, and the time is looked at only in a wait.
            yield self._descriptor, READ | WRITE

    def receive_piece(self, head: ResponseHead) -> Steps[bytes | memoryview | None]:
        """Receive the next piece of an answer's body; None is its end."""
        while True:
            if head.body_bytes == 0 or (head.chunk_decoder is not None and head.chunk_decoder.is_complete):
                return None
            if self._begin == self._end:
                into = np.empty(min(_PIECE_BYTES, head.body_bytes or _PIECE_BYTES), np.uint8).data
                if self._is_tls:
                    # As between interim answers.
                    yield self._descriptor, READ | WRITE
                got = yield from self._receive(into)
                piece = into[:got]
            else:
                piece = memoryview(bytes(self._take_buffered(head.body_bytes or _PIECE_BYTES)))
            if not piece:
                if head.body_bytes is None and head.chunk_decoder is None:
                    head.body_bytes = 0
                    return None
                raise self._make_end_error()
            if head.chunk_decoder is not None:
                decoded = head.chunk_decoder.decode(bytes(piece))
                if not decoded:
                    continue
                return decoded
            if head.body_bytes is not None:
                head.body_bytes -= len(piece)
            return piece

    def end_response(self, head: ResponseHead, sent: bool) -> None:
        """Say that an answer was read to its end.

        Args:
            head: of it.
            sent: what `send_request` returned.
        """
        has_more = self._begin < self._end or (head.chunk_decoder is not None and head.chunk_decoder.has_excess)
        self.is_reusable = sent and head.is_keep_alive and not has_more
        self.idle_since = time.monotonic()

    def _send_without_waiting(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send what the socket takes without a wait; return whether that is all."""
        self._sent_at_once = 0
        try:
            self._sent_at_once = self._socket.sendmsg(parts[:_MOST_PARTS], (), self._send_flags)
        except _LATER:
            return False
        return self._sent_at_once == sum(map(len, parts))

    def _send_some(self, views: list[memoryview]) -> int:
        if self._is_tls:
            return self._socket.send(views[0])
        return self._socket.sendmsg(views[:_MOST_PARTS], (), self._send_flags)

    def _receive_early_response(self) -> bool:
        """Whether an answer that is no interim one came while there is more to send, or nothing can."""
        try:
            if not self._receive_to_buffer_now():
                return True
        except (*_LATER, ssl.SSLWantReadError):
            return False
        # Of an interim one the head is left out when it is whole; until then there is time.
        while self._buffer.startswith(b"HTTP/1.1 1", self._begin, self._end) and self._take_head() is not None:
            pass
        if self._end - self._begin > HEAD_BYTES:
            return True
        beginning = bytes(self._buffer[self._begin : min(self._end, self._begin + 10)])
        return bool(beginning) and not b"HTTP/1.1 1".startswith(beginning)

    def _take_head(self) -> bytes | None:
        """Take the next head, if it is whole."""
        end = self._buffer.find(b"\r\n\r\n", self._begin, self._end)
        return None if end < 0 else bytes(self._take_buffered(end + 4 - self._begin))
