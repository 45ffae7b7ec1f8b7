"""Non-blocking reception from a socket, with or without TLS, into the final buffer."""

import select
import socket
import ssl
from typing import Protocol

import httpx

from normserve.client.http.socket_steps import READ, WRITE, Steps


class BlockingReceive(Protocol):
    """A function that receives from a blocking socket."""

    def __call__(self, connected: socket.socket, view: memoryview, /, *, until_full: bool) -> int:
        """Receive into memory, waiting until the deadline if necessary; return the number of bytes, 0 at the end.

        Args: until_full: wait until the memory is full, and not only for the first bytes.
        """


# A small response fits entirely, and of a large one at most this much is copied to the final buffer.
_FIRST_BYTES = 16 * 1024
# After so many bytes without a wait, other connections get a turn, and the deadline is checked.
TURN_BYTES = 4 * 2**20
# A large body is received in portions of this size at least.
_LEAST_BYTES = 256 * 1024

# A socket without TLS may be a blocking one; this flag makes a single call non-blocking.
NOW: int = getattr(socket, "MSG_DONTWAIT", 0)


class IncompleteResponseError(httpx.RemoteProtocolError):
    """The server closed the connection before its response was complete."""


class SocketReceiver:
    """An open socket and a buffer of received bytes that have not been taken yet.

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
        """Take received bytes from the buffer; the view is valid until more bytes are received."""
        begin = self._begin
        self._begin = min(self._end, begin + most_bytes)
        return memoryview(self._buffer)[begin : self._begin]

    def _receive_to_buffer(self, fill: BlockingReceive | None = None) -> Steps[None]:
        if fill is not None and not self._is_tls:
            if not self._receive_to_buffer_now(fill):
                raise self._make_end_error()
            return
        while True:
            if not self._is_tls:
                yield self._descriptor, READ
            try:
                if not self._receive_to_buffer_now():
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

    def _receive_to_buffer_now(self, fill: BlockingReceive | None = None) -> int:
        """Receive into the buffer without waiting, or with `fill` waiting for the first bytes."""
        if self._begin:
            self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        if self._end == len(self._buffer):
            self._buffer += bytes(len(self._buffer))
        view = memoryview(self._buffer)[self._end :]
        got = self._recv_into(view) if fill is None else self._receive_blocking(fill, view, until_full=False)
        self.has_answered = self.has_answered or got > 0
        self._end += got
        return got

    def _receive_exactly(self, view: memoryview, fill: BlockingReceive | None) -> Steps[None]:
        already = self._take_buffered(len(view))
        view[: len(already)] = already
        view = view[len(already) :]
        if self._is_tls:
            yield from self._receive_in_turns(view)
            return
        few = len(view) <= _LEAST_BYTES
        try:
            while view:
                if fill is not None:
                    got = self._receive_blocking(fill, view, until_full=True)
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
            if fill is None and not few:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _receive_blocking(self, fill: BlockingReceive, view: memoryview, *, until_full: bool) -> int:
        try:
            return fill(self._socket, view, until_full=until_full)
        except OSError as error:
            raise self._make_broken_error(error) from error

    def _receive_in_turns(self, view: memoryview) -> Steps[None]:
        turn = 0
        while view:
            got = yield from self._receive(view)
            if not got:
                raise self._make_end_error()
            view = view[got:]
            turn += got
            if turn >= TURN_BYTES:
                turn = 0
                # Bytes that were decrypted already are no event, but that it can be written to is one.
                yield self._descriptor, READ | WRITE

    def _receive(self, view: memoryview) -> Steps[int]:
        """Receive into memory; return the number of bytes, 0 at the end."""
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
