"""One HTTP/1.1 connection without waits: the caller that drives it waits for the socket.

Operations that may wait are generators: each yields a descriptor and the events of `select.poll`, is sent those
that occurred, and returns its result.  So threads and event loops drive the same code over sockets that never
block.  A body is sent from the caller's buffers, and a response of known length received into its buffer, one copy
each, in the kernel.
"""

import socket
import ssl
import time
from collections.abc import Sequence

import httpx
import numpy as np

from normserve.client.http.message_heads import HEAD_BYTES, ResponseHead, ResponseHeadParser
from normserve.client.http.parts import coalesce_small, drop_sent
from normserve.client.http.receiving import NOW, TURN_BYTES, BlockingReceive, SocketReceiver
from normserve.client.http.socket_steps import READ, WRITE, Steps
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import LimitedBody

# Size of the pieces of a body without a fitting buffer.
_PIECE_BYTES = 256 * 1024
# Of a request, with one call.
_MOST_PARTS = 64

_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError)


class ClientHttpConnection(SocketReceiver):
    """An open connection, used by one exchange at a time.

    Attributes:
        is_reusable: whether another exchange may follow the last one.
        has_answered: whether a byte of a response to the last request was received.
        idle_since: time of the last use, by time.monotonic.
    """

    def __init__(self, connected: socket.socket, *, blocks: bool = False) -> None:
        """Args:
        connected: a non-blocking socket, whose TLS handshake is complete.
        blocks: the socket does block, and sends with a short timeout (SO_SNDTIMEO): a blocking thread need not
            be woken for each part that the socket accepts.
        """
        super().__init__(connected)
        self.is_reusable = True
        self.idle_since = time.monotonic()
        self._send_flags = 0 if blocks else NOW
        self._head_parser = ResponseHeadParser()
        # Of the parts of a request, by the first call.
        self._sent_at_once = 0

    def close(self) -> None:
        """Close the connection."""
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
        """Send a request and return its response.

        Args:
            head, parts: of the request.
            most_bytes: limit of a successful response's body; the body of an error is dropped beyond a limit.
            room: buffer for the body, used if the body has a known length and fits; None always allocates one.
            fill: receives the response from a blocking socket, for callers that may block the thread.

        Raises:
            UnexpectedAnswerError: the response is longer than `most_bytes`, or compressed.
            httpx.TransportError: there is no response, or it is not HTTP.
        """
        sent = yield from self.send_request([head, *parts])
        answer = yield from self.receive_head(fill)
        status, headers = answer.status, answer.headers
        length, reception = answer.body_bytes, None
        # A response as expected needs no limited buffer.
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
        """Send the parts of a request in order; return whether all were sent before a response arrived.

        A server that refuses a request need not read it: its response counts for more than its closed socket.
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
                    ready_events = yield self._descriptor, READ | WRITE
                    if ready_events & ~WRITE and self._receive_early_response():
                        return False
        except OSError as error:
            self._send_error = error
            return False
        return True

    def receive_head(self, fill: BlockingReceive | None = None) -> Steps[ResponseHead]:
        """Receive the head of a response; interim responses (1xx) are skipped.

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
        """Receive the next piece of a response's body; None is its end."""
        while True:
            if head.body_bytes == 0 or (head.chunk_decoder is not None and head.chunk_decoder.is_complete):
                return None
            if self._begin == self._end:
                into = np.empty(min(_PIECE_BYTES, head.body_bytes or _PIECE_BYTES), np.uint8).data
                if self._is_tls:
                    # Let the caller check the deadline, as between interim responses.
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
        """Record that a response was read to its end, and whether the connection is reusable.

        Args:
            head: of the response.
            sent: the result of `send_request`.
        """
        has_more = self._begin < self._end or (head.chunk_decoder is not None and head.chunk_decoder.has_excess)
        self.is_reusable = sent and head.is_keep_alive and not has_more
        self.idle_since = time.monotonic()

    def _send_without_waiting(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send as many bytes as the socket accepts without a wait; return whether those are all."""
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
        """Return whether to stop sending: a final response has begun, or the connection has ended."""
        try:
            if not self._receive_to_buffer_now():
                return True
        except (*_LATER, ssl.SSLWantReadError):
            return False
        # Skip the complete heads of interim responses; an incomplete one is left for later.
        while self._buffer.startswith(b"HTTP/1.1 1", self._begin, self._end) and self._take_head() is not None:
            pass
        if self._end - self._begin > HEAD_BYTES:
            return True
        beginning = bytes(self._buffer[self._begin : min(self._end, self._begin + 10)])
        return bool(beginning) and not b"HTTP/1.1 1".startswith(beginning)

    def _take_head(self) -> bytes | None:
        """Take the next head from the buffer; return None if it is incomplete."""
        end = self._buffer.find(b"\r\n\r\n", self._begin, self._end)
        return None if end < 0 else bytes(self._take_buffered(end + 4 - self._begin))
