"""One HTTP/1.1 connection, without waiting: who drives it waits.

What takes time is a generator: it yields a descriptor and the events of `select.poll` that it waits for, is sent
those that came, and returns its result.  So threads and event loops drive the same code, over sockets that never
block.  A body is sent from where it lies, and an answer of known length received into memory of its own, one copy
each, in the kernel.
"""

import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import httpx
import numpy as np

from normserve.client.answers.answer import Answer
from normserve.client.answers.reception import Reception
from normserve.client.http.address import Address
from normserve.client.http.heads import HEAD_BYTES, AnswerHead, read_head

R = TypeVar("R")

# The events of `select.poll`; Windows has none, and leaves these connections to httpx.
READ: int = getattr(select, "POLLIN", 1)
WRITE: int = getattr(select, "POLLOUT", 4)

#: Receives into memory all that fits, however long it takes, as long as there is time; 0 is the end.
Fill: TypeAlias = Callable[[socket.socket, memoryview], int]

#: Something that waits now and then for events at a descriptor.
Steps: TypeAlias = Generator[tuple[int, int], int, R]

# A small answer comes at once, and of a large one no more has to be moved to where it stays.
_FIRST_BYTES = 16 * 1024
# Of a body that comes in pieces.
_PIECE_BYTES = 256 * 1024
# After so many bytes without a wait others get their turn, and the time is looked at.
_TURN_BYTES = 4 * 2**20
# One record of TLS; more than one part in it saves a record and a call.
_RECORD_BYTES = 16 * 1024
_MOST_PARTS = 64

# A large body is received in portions of this size at least.
_LEAST_BYTES = 256 * 1024

# A socket without TLS may be one that blocks; what is not asked to does not.
_NOW: int = getattr(socket, "MSG_DONTWAIT", 0)

_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError)


class EndedEarlyError(httpx.RemoteProtocolError):
    """The server closed the connection before its answer was whole."""


class Connection:
    """An open connection, used by one exchange at a time.

    Attributes:
        address: where to.
        is_reusable: whether the last exchange left it so that another may follow.
        has_answered: whether a byte of an answer to the last request came.
        idle_since: when it was last used, by time.monotonic.
    """

    def __init__(self, connected: socket.socket, address: Address, *, blocks: bool = False) -> None:
        """Args:
        connected: does not block, and has done its handshake.
        address: where to.
        blocks: that it does block after all, sending not for long (SO_SNDTIMEO): who has a thread to spare need not
            be woken for each part that the socket takes.
        """
        self.address = address
        self.is_reusable = True
        self.has_answered = False
        self.idle_since = time.monotonic()
        self._socket = connected
        self._descriptor = connected.fileno()
        self._tls = isinstance(connected, ssl.SSLSocket)
        self._send_flags = 0 if blocks else _NOW
        # What came and was not taken yet lies between the two.
        self._buffer = bytearray(_FIRST_BYTES)
        self._start = self._stop = 0
        self._failure: OSError | None = None
        # Of the parts of a request, by the first call.
        self._already = 0

    def is_quiet(self) -> bool:
        """Whether there is nothing to read while nobody asks: neither an end nor what nobody asked for."""
        poll = select.poll()
        poll.register(self._descriptor, READ)
        return not poll.poll(0)

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
        fill: Fill | None = None,
    ) -> Steps[Answer]:
        """Send a request and return its answer.

        Args:
            head, parts: of the request.
            most_bytes: what the body of a successful answer can have; an error's is left out if it is too long.
            room: memory for the body, used if that has a length and fits; None always makes new memory.
            fill: receives as much of a body as comes in time, for who may block the thread; it returns how much.

        Raises:
            UnexpectedAnswerError: the answer is longer than that, or compressed.
            httpx.TransportError: there is none, or what came is no HTTP.
        """
        sent = yield from self.send([head, *parts])
        answer = yield from self.head()
        status, headers = answer.status, answer.headers
        length, reception = answer.length, None
        # What is as it should be needs no second look.
        if status >= 400 or length is None or length > most_bytes or "content-encoding" in headers:
            reception = Reception(status, headers, most_bytes)
        if length is not None and (reception is None or reception.is_wanted):
            if room is None or len(room) < length:
                # Not cleared before it is filled, which a bytearray would be.
                room = np.empty(length, np.uint8).data
            body = room[:length]
            yield from self._fill(body, fill)
            self.end(answer, sent)
            return Answer(status, headers, body)
        reception = reception or Reception(status, headers, most_bytes)
        while reception.is_wanted:
            piece = yield from self.piece(answer)
            if piece is None:
                self.end(answer, sent)
                break
            reception.take(piece)
        return Answer(status, headers, reception.body())

    def send(self, parts: Sequence[bytes | memoryview]) -> Steps[bool]:
        """Send these one after another; return whether all of it went, and not an answer came before.

        A server that refuses a request need not read it: what it says is more than that it no longer listens.
        """
        self.is_reusable = self.has_answered = False
        self._failure = None
        turn = 0
        try:
            if not self._tls and self._send_at_once(parts):
                return True
            views = [memoryview(part).cast("B") for part in parts if len(part)]
            if self._tls:
                views = _coalesced(views)
            else:
                _advance(views, self._already)
            while views:
                try:
                    sent = self._send_some(views)
                except ssl.SSLWantReadError:
                    yield self._descriptor, READ
                    continue
                except _LATER:
                    turn = _TURN_BYTES
                else:
                    _advance(views, sent)
                    # Of a socket that took a part there is nothing more to ask for now.
                    turn = turn + sent if self._tls else _TURN_BYTES
                if turn >= _TURN_BYTES and views:
                    turn = 0
                    came = yield self._descriptor, READ | WRITE
                    if came & ~WRITE and self._is_refused():
                        return False
        except OSError as error:
            self._failure = error
            return False
        return True

    def head(self, *, has_body: bool = True) -> Steps[AnswerHead]:
        """Receive an answer's head; interim ones before it are left out.

        Args: has_body: as in `read_head`.
        """
        while True:
            raw = self._next_head()
            while raw is None and self._stop - self._start <= HEAD_BYTES:
                yield from self._receive_more()
                raw = self._next_head()
            if raw is None or len(raw) > HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"an answer's head must be at most {HEAD_BYTES} bytes")
            head = read_head(raw, has_body=has_body)
            if head.status >= 200:
                return head

    def piece(self, head: AnswerHead) -> Steps[bytes | memoryview | None]:
        """Receive the next piece of an answer's body; None is its end."""
        while True:
            if head.length == 0 or (head.chunks is not None and head.chunks.is_complete):
                return None
            if self._start == self._stop:
                into = np.empty(min(_PIECE_BYTES, head.length or _PIECE_BYTES), np.uint8).data
                got = yield from self._receive(into)
                piece = into[:got]
            else:
                piece = memoryview(bytes(self._take(head.length or _PIECE_BYTES)))
            if not piece:
                if head.length is None and head.chunks is None:
                    head.length = 0
                    return None
                raise self._ended()
            if head.chunks is not None:
                decoded = head.chunks.feed(bytes(piece))
                if not decoded:
                    continue
                return decoded
            if head.length is not None:
                head.length -= len(piece)
            return piece

    def end(self, head: AnswerHead, sent: bool) -> None:
        """Say that an answer was read to its end.

        Args:
            head: of it.
            sent: what `send` returned.
        """
        has_more = self._start < self._stop or (head.chunks is not None and head.chunks.has_more)
        self.is_reusable = sent and head.stays and not has_more
        self.idle_since = time.monotonic()

    def _send_at_once(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send what the socket takes without a wait; return whether that is all."""
        self._already = 0
        with suppress(*_LATER):
            self._already = self._socket.sendmsg(parts[:_MOST_PARTS], (), self._send_flags)
        return self._already == sum(map(len, parts))

    def _send_some(self, views: list[memoryview]) -> int:
        if self._tls:
            return self._socket.send(views[0])
        return self._socket.sendmsg(views[:_MOST_PARTS], (), self._send_flags)

    def _is_refused(self) -> bool:
        """Whether an answer that is no interim one came while there is more to send, or nothing can."""
        try:
            if not self._receive_now():
                return True
        except (*_LATER, ssl.SSLWantReadError):
            return False
        # Of an interim one the head is left out when it is whole; until then there is time.
        while self._buffer.startswith(b"HTTP/1.1 1", self._start, self._stop) and self._next_head() is not None:
            pass
        if self._stop - self._start > HEAD_BYTES:
            return True
        beginning = bytes(self._buffer[self._start : min(self._stop, self._start + 10)])
        return bool(beginning) and not b"HTTP/1.1 1".startswith(beginning)

    def _next_head(self) -> bytes | None:
        """Take the next head, if it is whole."""
        end = self._buffer.find(b"\r\n\r\n", self._start, self._stop)
        return None if end < 0 else bytes(self._take(end + 4 - self._start))

    def _take(self, most_bytes: int) -> memoryview:
        """What came, valid until more is received."""
        begin = self._start
        self._start = min(self._stop, begin + most_bytes)
        return memoryview(self._buffer)[begin : self._start]

    def _receive_more(self) -> Steps[None]:
        while True:
            if not self._tls:
                yield self._descriptor, READ
            try:
                if not self._receive_now():
                    raise self._ended()
                return
            except ssl.SSLWantReadError:
                yield self._descriptor, READ
            except ssl.SSLWantWriteError:
                yield self._descriptor, WRITE
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise self._broken(error) from error

    def _receive_now(self) -> int:
        """Receive what is there behind what was not taken yet."""
        if self._start:
            self._buffer[: self._stop - self._start] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, self._stop - self._start
        if self._stop == len(self._buffer):
            self._buffer += bytes(len(self._buffer))
        got = self._recv_into(memoryview(self._buffer)[self._stop :])
        self.has_answered = self.has_answered or got > 0
        self._stop += got
        return got

    def _fill(self, view: memoryview, fill: Fill | None) -> Steps[None]:
        already = self._take(len(view))
        view[: len(already)] = already
        view = view[len(already) :]
        if self._tls:
            yield from self._fill_in_turns(view)
            return
        few = len(view) <= _LEAST_BYTES
        try:
            while view:
                if fill is not None:
                    got = self._filled(fill, view)
                else:
                    if not few:
                        # Nobody is woken for less, but at the end.
                        least = min(_LEAST_BYTES, len(view))
                        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                    got = yield from self._receive(view)
                if not got:
                    raise self._ended()
                view = view[got:]
        finally:
            if fill is None and not few:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _filled(self, fill: Fill, view: memoryview) -> int:
        try:
            return fill(self._socket, view)
        except OSError as error:
            raise self._broken(error) from error

    def _fill_in_turns(self, view: memoryview) -> Steps[None]:
        turn = 0
        while view:
            got = yield from self._receive(view)
            if not got:
                raise self._ended()
            view = view[got:]
            turn += got
            if turn >= _TURN_BYTES:
                turn = 0
                # Bytes that were decrypted already are no event, but that it can be written to is one.
                yield self._descriptor, READ | WRITE

    def _receive(self, view: memoryview) -> Steps[int]:
        """Receive into memory; 0 is the end."""
        while True:
            if not self._tls:
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
                raise self._broken(error) from error

    def _recv_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view) if self._tls else self._socket.recv_into(view, 0, _NOW)

    def _ended(self) -> httpx.TransportError:
        if self._failure is not None and not self.has_answered:
            return httpx.WriteError(str(self._failure))
        return EndedEarlyError("the server closed the connection before its answer was whole")

    def _broken(self, error: OSError) -> httpx.TransportError:
        if self._failure is not None and not self.has_answered:
            return httpx.WriteError(str(self._failure))
        return httpx.ReadError(str(error))


def _coalesced(views: list[memoryview]) -> list[memoryview]:
    """Views of which the small ones at the beginning are one."""
    small = b""
    for place, view in enumerate(views):
        if len(small) + len(view) > _RECORD_BYTES:
            return [memoryview(small), *views[place:]] if small else views
        small += view
    return [memoryview(small)] if small else views


def _advance(views: list[memoryview], sent: int) -> None:
    """Leave out the first bytes."""
    while sent:
        if sent < len(views[0]):
            views[0] = views[0][sent:]
            return
        sent -= len(views.pop(0))


def connecting(unconnected: socket.socket, where: Any) -> Steps[None]:
    """Connect a socket that does not block.

    Raises:
        OSError: it cannot be connected.
    """
    try:
        unconnected.connect(where)
    except BlockingIOError:
        # Who listens at a path takes a connection at once or has too many.
        if unconnected.family == socket.AF_UNIX:
            raise
        yield unconnected.fileno(), WRITE
        if error := unconnected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, f"connecting failed: {os.strerror(error)}") from None


def shaking_hands(connected: ssl.SSLSocket) -> Steps[None]:
    """Do a handshake of TLS.

    Raises:
        OSError: it failed.
    """
    while True:
        try:
            connected.do_handshake()
            return
        except ssl.SSLWantReadError:
            yield connected.fileno(), READ
        except ssl.SSLWantWriteError:
            yield connected.fileno(), WRITE
