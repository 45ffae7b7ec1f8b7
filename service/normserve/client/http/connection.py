"""An HTTP/1.1 connection without waits: the caller that drives it waits for the socket.

Operations that may wait are generators: each yields a descriptor and the events of `select.poll`, is sent the
events that occurred, and returns its result.  So threads and event loops drive the same code over sockets that
never block, with or without TLS; a caller that may block its thread can pass a `BlockingReceive`.  A body is sent
from the caller's buffers, and a response of known length is received into its final buffer, one copy each, in the
kernel.
"""

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Protocol

import httpx
import numpy as np

from normserve.client.http.message_heads import HEAD_BYTES, ResponseHead, ResponseHeadParser
from normserve.client.http.socket_steps import READ, WRITE, Steps
from normserve.client.responses.api_response import ApiResponse
from normserve.client.responses.body_limits import LimitedBody

# A small response fits entirely, and of a large one at most this much is copied to the final buffer.
_FIRST_BYTES = 16 * 1024
# After so many bytes without a wait, other connections get a turn, and the deadline is checked.
_TURN_BYTES = 4 * 2**20

# A large body is received in portions of this size at least.
_LEAST_BYTES = 256 * 1024

# One record of TLS; more than one part in it saves a record and a call.
_RECORD_BYTES = 16 * 1024

# Size of the pieces of a body without a fitting buffer.
_PIECE_BYTES = 256 * 1024

# Of a request, with one call.
_MOST_PARTS = 64

# A socket without TLS may be a blocking one; this flag makes a single call non-blocking.
NOW: int = getattr(socket, "MSG_DONTWAIT", 0)

_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError)


class BlockingReceive(Protocol):
    """The type of a function that receives from a blocking socket until its own deadline."""

    def __call__(self, connected: socket.socket, view: memoryview, /, *, until_full: bool) -> int:
        """Receive into memory, waiting until the deadline if necessary; return the number of bytes, 0 at the end.

        Args: until_full: wait until the memory is full, and not only for the first bytes.
        """


class IncompleteResponseError(httpx.RemoteProtocolError):
    """The server closed the connection before its response was complete."""


class SocketReceiver:
    """The receiving side of a connection: its socket, and a buffer of bytes received but not yet used.

    Attributes:
        has_answered: whether a byte of a response to the last request was received.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Args: connected: the socket, whose TLS handshake is complete."""
        self.has_answered = False
        self._socket = connected
        self._descriptor = connected.fileno()
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(self._descriptor, READ)
        # Received bytes that were not taken yet are between the two offsets.
        self._buffer = bytearray(_FIRST_BYTES)
        self._begin = self._end = 0
        # Why the last request was not sent; raised where there is no response to it.
        self._send_error: OSError | None = None

    def is_quiet(self) -> bool:
        """Return whether an idle connection has nothing to read: neither its end nor unrequested bytes."""
        return not self._poll.poll(0)

    def _take_buffered(self, most_bytes: int) -> memoryview:
        """Remove at most `most_bytes` bytes from the buffer and return a view of them.  The view is valid until
        bytes are received again.
        """
        begin = self._begin
        self._begin = min(self._end, begin + most_bytes)
        return memoryview(self._buffer)[begin : self._begin]

    def _receive_to_buffer(self, blocking_receive: BlockingReceive | None = None) -> Steps[None]:
        """Receive at least one byte into the buffer.

        The caller waits for the socket between the steps; with `blocking_receive`, and without TLS, this thread
        blocks instead.

        Raises:
            httpx.TransportError: the server closed the connection, or it broke.
        """
        if blocking_receive is not None and not self._is_tls:
            if not self._receive_once_to_buffer(blocking_receive):
                raise self._make_end_error()
            return
        while True:
            if not self._is_tls:
                yield self._descriptor, READ
            try:
                if not self._receive_once_to_buffer():
                    raise self._make_end_error()
                return
            except ssl.SSLWantReadError:
                yield self._descriptor, READ
            except ssl.SSLWantWriteError:
                yield self._descriptor, WRITE
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise self._make_broken_error(error) from error

    def _receive_once_to_buffer(self, blocking_receive: BlockingReceive | None = None) -> int:
        """Receive once into the buffer, and return the number of bytes, 0 if the server closed the connection.

        With `blocking_receive` this blocks until bytes arrive.  Without, it never waits.

        Raises:
            BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError: without `blocking_receive`, nothing has
            arrived.
        """
        if self._begin:
            self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        if self._end == len(self._buffer):
            self._buffer += bytes(len(self._buffer))
        view = memoryview(self._buffer)[self._end :]
        got = (
            self._recv_into(view)
            if blocking_receive is None
            else self._receive_blocking(blocking_receive, view, until_full=False)
        )
        self.has_answered = self.has_answered or got > 0
        self._end += got
        return got

    def _receive_exactly(self, view: memoryview, blocking_receive: BlockingReceive | None) -> Steps[None]:
        """Fill the memory with buffered bytes, then with bytes received directly into the memory.

        Raises:
            httpx.TransportError: the server closed the connection before the memory was full, or it broke.
        """
        already = self._take_buffered(len(view))
        view[: len(already)] = already
        view = view[len(already) :]
        if self._is_tls:
            yield from self._receive_in_turns(view)
            return
        few = len(view) <= _LEAST_BYTES
        try:
            while view:
                if blocking_receive is not None:
                    got = self._receive_blocking(blocking_receive, view, until_full=True)
                else:
                    if not few:
                        # The thread is not woken for less, except at the end.
                        least = min(_LEAST_BYTES, len(view))
                        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                    got = yield from self._receive(view)
                if not got:
                    raise self._make_end_error()
                view = view[got:]
        finally:
            if blocking_receive is None and not few:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _receive_blocking(self, blocking_receive: BlockingReceive, view: memoryview, *, until_full: bool) -> int:
        """Receive with `blocking_receive`, and convert an OSError to the httpx error of a broken connection."""
        try:
            return blocking_receive(self._socket, view, until_full=until_full)
        except OSError as error:
            raise self._make_broken_error(error) from error

    def _receive_in_turns(self, view: memoryview) -> Steps[None]:
        """Fill the memory with bytes received over TLS, with a wait after every `_TURN_BYTES` bytes.

        In this wait other connections get a turn, and the caller checks the deadline: decrypted bytes can keep
        arriving without any wait for the socket.
        """
        turn = 0
        while view:
            got = yield from self._receive(view)
            if not got:
                raise self._make_end_error()
            view = view[got:]
            turn += got
            if turn >= _TURN_BYTES:
                turn = 0
                # Bytes that were decrypted already are no event, but that it can be written to is one.
                yield self._descriptor, READ | WRITE

    def _receive(self, view: memoryview) -> Steps[int]:
        """Receive bytes into memory; return their number, 0 if the server closed the connection."""
        while True:
            if not self._is_tls:
                yield self._descriptor, READ
            try:
                return self._recv_into(view)
            except ssl.SSLWantReadError:
                yield self._descriptor, READ
            except ssl.SSLWantWriteError:
                yield self._descriptor, WRITE
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise self._make_broken_error(error) from error

    def _recv_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view) if self._is_tls else self._socket.recv_into(view, 0, NOW)

    def _make_end_error(self) -> httpx.TransportError:
        if self._send_error is not None and not self.has_answered:
            return httpx.WriteError(str(self._send_error))
        return IncompleteResponseError("the server closed the connection before its answer was complete")

    def _make_broken_error(self, error: OSError) -> httpx.TransportError:
        if self._send_error is not None and not self.has_answered:
            return httpx.WriteError(str(self._send_error))
        return httpx.ReadError(str(error))


class ClientHttpConnection(SocketReceiver):
    """An open HTTP/1.1 connection, used by one exchange of a request and its response at a time.

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
        body_buffer: memoryview | None = None,
        blocking_receive: BlockingReceive | None = None,
    ) -> Steps[ApiResponse]:
        """Send a request and return its response.

        Args:
            head, parts: the encoded head of the request, and the parts of its body.
            most_bytes: limit of a successful response's body; the body of an error is dropped beyond a limit.
            body_buffer: buffer for the body, used if the body has a known length and fits; None always allocates
                one.
            blocking_receive: receives the response from a blocking socket, for callers that may block the thread.

        Raises:
            UnexpectedAnswerError: the response is longer than `most_bytes`, or compressed.
            httpx.TransportError: there is no response, or it is not HTTP.
        """
        sent = yield from self.send_request([head, *parts])
        answer = yield from self.receive_head(blocking_receive)
        status, headers = answer.status, answer.headers
        length, reception = answer.remaining_body_bytes, None
        # A response as expected needs no limited buffer.
        if status >= 400 or length is None or length > most_bytes or "content-encoding" in headers:
            reception = LimitedBody(status, headers, most_bytes)
        if length is not None and (reception is None or reception.is_wanted):
            if body_buffer is None or len(body_buffer) < length:
                # Not cleared before it is filled, which a bytearray would be.
                body_buffer = np.empty(length, np.uint8).data
            body = body_buffer[:length]
            yield from self._receive_exactly(body, blocking_receive)
            self.end_response(answer, sent)
            return ApiResponse(status, headers, body)
        reception = reception or LimitedBody(status, headers, most_bytes)
        while reception.is_wanted:
            piece = yield from self.receive_piece(answer)
            if piece is None:
                self.end_response(answer, sent)
                break
            reception.append_if_wanted(piece)
        return ApiResponse(status, headers, reception.get_body())

    def send_request(self, parts: Sequence[bytes | memoryview]) -> Steps[bool]:
        """Send the parts of a request in order; return whether all were sent before a response arrived.

        A server that refuses a request need not read it: its response counts for more than its closed socket.
        """
        self.is_reusable = self.has_answered = False
        self._send_error = None
        turn = 0
        try:
            if not self._is_tls and self._try_send_in_one_call(parts):
                return True
            views = [memoryview(part).cast("B") for part in parts if len(part)]
            if self._is_tls:
                views = _join_into_first_tls_record(views)
            else:
                _drop_sent(views, self._sent_at_once)
            while views:
                try:
                    sent = self._send_some(views)
                except ssl.SSLWantReadError:
                    yield self._descriptor, READ
                    continue
                except _LATER:
                    turn = _TURN_BYTES
                else:
                    _drop_sent(views, sent)
                    # Of a socket that took a part there is nothing more to ask for now.
                    turn = turn + sent if self._is_tls else _TURN_BYTES
                if turn >= _TURN_BYTES and views:
                    turn = 0
                    ready_events = yield self._descriptor, READ | WRITE
                    if ready_events & ~WRITE and self._receive_early_response():
                        return False
        except OSError as error:
            self._send_error = error
            return False
        return True

    def receive_head(self, blocking_receive: BlockingReceive | None = None) -> Steps[ResponseHead]:
        """Receive the head of a response; interim responses (1xx) are skipped.

        Args: blocking_receive: as in `exchange`.
        """
        while True:
            raw = self._take_head()
            while raw is None and self._end - self._begin <= HEAD_BYTES:
                yield from self._receive_to_buffer(blocking_receive)
                raw = self._take_head()
            if raw is None or len(raw) > HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"an answer's header must be at most {HEAD_BYTES} bytes")
            head = self._head_parser.parse(raw)
            if head.status >= 200:
                return head
            # A server may send these faster than they are read, and the time is looked at only in a wait.
            yield self._descriptor, READ | WRITE

    def receive_piece(self, head: ResponseHead) -> Steps[bytes | memoryview | None]:
        """Receive the next piece of a response's body; return None at the end of the body.

        The pieces of a chunked body are decoded.
        """
        while True:
            if head.remaining_body_bytes == 0 or (
                head.chunk_decoder is not None and head.chunk_decoder.is_complete
            ):
                return None
            if self._begin == self._end:
                into = np.empty(min(_PIECE_BYTES, head.remaining_body_bytes or _PIECE_BYTES), np.uint8).data
                if self._is_tls:
                    # Let the caller check the deadline, as between interim responses.
                    yield self._descriptor, READ | WRITE
                got = yield from self._receive(into)
                piece = into[:got]
            else:
                piece = memoryview(bytes(self._take_buffered(head.remaining_body_bytes or _PIECE_BYTES)))
            if not piece:
                if head.remaining_body_bytes is None and head.chunk_decoder is None:
                    head.remaining_body_bytes = 0
                    return None
                raise self._make_end_error()
            if head.chunk_decoder is not None:
                decoded = head.chunk_decoder.decode(bytes(piece))
                if not decoded:
                    continue
                return decoded
            if head.remaining_body_bytes is not None:
                head.remaining_body_bytes -= len(piece)
            return piece

    def end_response(self, head: ResponseHead, was_request_sent: bool) -> None:
        """Record that a response was received completely, and determine whether the connection is reusable.

        Args:
            head: of the response.
            was_request_sent: whether the request was sent completely, the result of `send_request`.
        """
        has_more = self._begin < self._end or (head.chunk_decoder is not None and head.chunk_decoder.has_excess)
        self.is_reusable = was_request_sent and head.is_keep_alive and not has_more
        self.idle_since = time.monotonic()

    def _try_send_in_one_call(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send as much of a request as one system call accepts; return whether that was the entire request.

        A non-blocking socket does not wait; a blocking one waits for its short send timeout at most.
        """
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
        """Receive bytes that the server sends before the request is sent completely.  Return whether to stop
        sending the request.

        That is so if a final response has begun or the server closed the connection.  Complete interim responses
        (1xx) are dropped.
        """
        try:
            if not self._receive_once_to_buffer():
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


def _join_into_first_tls_record(views: list[memoryview]) -> list[memoryview]:
    """Join the first views, as many as fit into one TLS record.  Return the joined view, followed by the other
    views.

    This saves a record and a system call for each joined view.
    """
    small = b""
    for place, view in enumerate(views):
        if len(small) + len(view) > _RECORD_BYTES:
            return [memoryview(small), *views[place:]] if small else views
        small += view
    return [memoryview(small)] if small else views


def _drop_sent(views: list[memoryview], sent: int) -> None:
    """Remove the first `sent` bytes from the views, in place."""
    while sent:
        if sent < len(views[0]):
            views[0] = views[0][sent:]
            return
        sent -= len(views.pop(0))
