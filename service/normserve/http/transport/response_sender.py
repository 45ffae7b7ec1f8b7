"""The transmission of a response, and the detection of disconnected clients.

Most clients that have closed their sending side wait for their response; others have disconnected.
"""

import asyncio
import fcntl
import select
import socket
import struct
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from normserve.http.transport.transfer_progress import TransferProgress

# Every response begins with these bytes, so they can be sent ahead of it.  The host of a disconnected client
# answers them with a reset; otherwise it accepts them.
_PROBE = b"HTTP/1.1 "

# Up to this size one write of a copy is cheaper than a gathering write.
_JOIN_BYTES = 16 * 1024
# Limit of one write: if the client reads fast enough, the operating system takes 16 MiB in one call of 5 ms, and
# all clients # wait.
_PORTION_BYTES = 2 * 2**20
# TLS encrypts a portion at once, and reports its progress in whole portions.
TLS_PORTION_BYTES = 256 * 2**10

_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.005, 0.5

Headers = Sequence[tuple[bytes, bytes]]
Buffers = Sequence[bytes | memoryview]


class ResponseSender(ABC):
    """The interface through which routes send a response.

    Attributes:
        on_disconnect: called if the client disconnects before its response is complete.
        ended_at: when the operating system took the last byte, by `time.perf_counter`; 0 before.
        is_relayed: whether another process has the client's connection.
        is_delivered: whether the operating system took the last byte while the client was connected; None before
            the end.
    """

    is_relayed = False

    def __init__(self) -> None:
        self._began_at = 0.0
        self.ended_at = 0.0
        self.on_disconnect: Callable[[], None] | None = None
        self.is_delivered: bool | None = None

    @abstractmethod
    async def send_response(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        """Send a complete response; return when the operating system has taken the last byte.

        Args:
            headers: all but those that every response has; content-length is `nbytes`.
            buffers: the body in pieces, which are not joined if copying them would cost more.

        Raises:
            MemoryError: there is no memory to send from; the response has not begun.
        """

    @property
    def has_started(self) -> bool:
        """Whether a response has started, so that no other one can be sent."""
        return self._began_at > 0

    @property
    def send_s(self) -> float:
        """The seconds from the first byte of the response until the operating system took the last one."""
        return (self.ended_at or time.perf_counter()) - self._began_at if self._began_at else 0.0


class SocketResponseSender(ResponseSender):
    """The sender of a response over a socket; uvicorn's request cycle uses it in place of the transport.

    Small writes are gathered, so that header and body are sent together.

    Attributes:
        progress: the response's speed, from the first time that the operating system could take no more bytes.
        pending_bytes: the bytes that were unsent at that time, and those written after them.
    """

    # Class attributes, because small responses need neither.
    progress: TransferProgress | None = None
    pending_bytes = 0

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        cycle: RequestResponseCycle,
        *,
        is_encrypted: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        """Args: close: called to close the transport; None closes it at once."""
        super().__init__()
        self._transport = transport
        self._max_write_bytes = TLS_PORTION_BYTES if is_encrypted else _PORTION_BYTES
        self._loop = loop
        self._cycle: RequestResponseCycle | None = cycle
        self._close_connection = close
        self._has_sent_probe = False
        self._was_closing_before = False
        self._is_closed = False
        self._buffered_data: list[bytes | memoryview] = []
        self._buffered_bytes = 0

    async def send_response(self, status: int, headers: Headers, buffers: Buffers, nbytes: int) -> None:
        """Send a complete response; return when the operating system has taken the last byte.

        This does in one step as much as uvicorn's cycle does in several ASGI messages.  Nothing more is
        sent once the client has disconnected.
        """
        cycle = self._cycle
        if cycle is None or not await self._drain_writes(cycle):
            return
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        head = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        head_lines = [self._start_with(STATUS_LINE[status]), *head, b"\r\n"]
        if nbytes <= _JOIN_BYTES:
            self._transport.write(b"".join([*head_lines, *buffers]))
        else:
            for number, portion in enumerate(
                _split_into_writes([b"".join(head_lines), *buffers], self._max_write_bytes)
            ):
                # Let other tasks run between portions, even if the operating system took all of one.  Not after the
                # last: the # client may read it and leave before this task continues.
                if number:
                    await asyncio.sleep(0)
                    if cycle.disconnected:
                        return
                self.pending_bytes += sum(map(len, portion))
                self._transport.writelines(portion)
                if not await self._drain_writes(cycle):
                    return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.close()
        cycle.on_response()

    async def _drain_writes(self, cycle: RequestResponseCycle) -> bool:
        """Wait until the operating system has taken all earlier writes; return whether the client is connected."""
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        return not cycle.disconnected

    def write(self, data: bytes | memoryview) -> None:
        """Buffer data, so that all writes in one step of the event loop are sent together.

        More than 16 KiB are sent at once.
        """
        if not self._began_at:
            data = self._start_with(data)
        if not len(data):
            return
        self._buffered_data.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > _JOIN_BYTES:
            self.flush()
        elif len(self._buffered_data) == 1:
            self._loop.call_soon(self.flush)

    def send_disconnect_probe(self) -> None:
        """Send the first bytes of a response that has not begun, to detect a disconnected client.

        The host of a disconnected client answers them with a reset.
        """
        if not self._began_at:
            self._has_sent_probe = True
            self._transport.write(_PROBE)

    def _start_with(self, data: bytes | memoryview) -> bytes | memoryview:
        """Start the response; return its first data without the bytes that `send_disconnect_probe` has sent."""
        self._began_at = time.perf_counter()
        return data[len(_PROBE) :] if self._has_sent_probe else data

    def flush(self) -> None:
        """Send the buffered data, joined if they are short."""
        held, nbytes = self._buffered_data, self._buffered_bytes
        if not nbytes:
            return
        self._buffered_data, self._buffered_bytes = [], 0
        if nbytes > _JOIN_BYTES:
            self.pending_bytes += nbytes
            self._transport.writelines(held)
        else:
            self._transport.write(b"".join(held))

    def finish_response(self) -> None:
        """Send the buffered end of a response, and record whether it was delivered.

        Called when the operating system has taken all earlier data.
        """
        self.flush()
        if self.is_delivered is None:
            was_closing = self._was_closing_before if self._is_closed else self._transport.is_closing()
            self.is_delivered = not was_closing
            self.ended_at = time.perf_counter()
        self._cycle = None

    def handle_disconnect(self) -> None:
        """Drop buffered data, because the client has disconnected.

        An incomplete response is marked as not delivered, and `on_disconnect` is called.
        """
        self._cycle = None
        self._buffered_data, self._buffered_bytes = [], 0
        if self.is_delivered is None:
            self.is_delivered = False
            if self.on_disconnect is not None:
                self.on_disconnect()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    async def abort_connection(self) -> None:
        """Abort the connection, in place of a response for which there is no memory."""
        self._transport.abort()

    def close(self) -> None:
        """Send buffered data, then close the connection.

        uvicorn's cycle calls this just before the end of the connection's last response, or in place of an
        incomplete one.
        """
        self.flush()
        self._was_closing_before, self._is_closed = self._transport.is_closing(), True
        (self._close_connection or self._transport.close)()


def _split_into_writes(buffers: Buffers, portion_bytes: int) -> Iterator[list[bytes | memoryview]]:
    """Split the buffers, in order, into lists of views with `portion_bytes` each, or fewer in the last."""
    portion: list[bytes | memoryview] = []
    room = portion_bytes
    for buffer in buffers:
        start = 0
        while len(buffer) - start > room:
            yield [*portion, buffer[start : start + room]]
            start += room
            portion, room = [], portion_bytes
        portion.append(buffer[start:] if start else buffer)
        room -= len(buffer) - start
    yield portion


class HalfClosedMonitor:
    """Detects when a client that has ended its sending side disconnects, and then aborts the connection.

    The end of the client's data does not show whether it still reads, and the event loop detects
    nothing else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._poller = select.poll()
        self._poller.register(transport.get_extra_info("socket").fileno(), 0)
        self._timer = loop.call_later(_FIRST_LOOK_S, self._check_hangup, _FIRST_LOOK_S)

    def stop(self) -> None:
        self._timer.cancel()

    def _check_hangup(self, pause_s: float) -> None:
        """Abort the connection if the client has disconnected; else check again after a longer pause."""
        # With an empty event mask, only a hang-up or an error is reported.
        if self._poller.poll(0):
            self._transport.abort()
            return
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._timer = self._loop.call_later(pause_s, self._check_hangup, pause_s)


def can_detect_disconnect(transport: asyncio.Transport) -> bool:
    """Return whether the operating system reports a disconnected client without any data being sent."""
    return bool(transport.get_extra_info("socket").family == socket.AF_UNIX)


def count_unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the operating system has taken and the client's host has not acknowledged."""
    answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", answer)[0])
