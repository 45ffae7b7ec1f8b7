"""Messages between the process that accepts connections and those that serve them, over a stream socket pair.

Every message is one number of eight bytes.  A connection is handed over with a unique number.  The process that
serves sends that number back twice: when it has received the connection, and when the connection has ended.  Until
the first of these, the process that accepted the connection keeps it open as well, and hands it to another process
if the serving process ends.

`SupervisorChannel` is the serving process's end.
"""

import asyncio
import contextlib
import functools
import logging
import socket
import struct
from collections.abc import Callable

from normserve.logs.formatting import ThrottledLogger
from normserve.socket_readers import add_persistent_reader

log = logging.getLogger(__name__)

MESSAGE = struct.Struct("<Q")

READY, NOT_READY = 2**64 - 1, 2**64 - 2
"""Messages that a serving process can, or cannot, take connections: sent at each change and every `BEAT_S`."""

BEAT_S = 0.5

REFUSED = {
    "max_connections": 2**64 - 3,
    "max_connections_per_address": 2**64 - 4,
    "local_connections": 2**64 - 5,
}
"""Messages that a connection was refused, by the exceeded limit: a process that owns a device counts it, since it
has the metrics.
"""

_REASONS = {number: reason for reason, number in REFUSED.items()}

RESTARTED = 2**63
"""The message that a child of the supervisor without a device is started again, to which the child's index in
`FleetPosition.children` is added.  A process that owns a device counts it.
"""

_BEYOND = {"max_connections": 2**62, "max_connections_per_address": 2**61}
# Numbers that are no connection's begin here.
_SPECIAL = 2**63

LINK = 2**64 - 6
"""The message whose socket is a link between a front end and a process that owns a device, not a client's
connection.
"""


def encode_connection(number: int, exceeded_limit: str | None) -> int:
    """Encode a connection's number, and the limit that it exceeds if there is one, as one number.  This number is
    sent as a message.
    """
    return number if exceeded_limit is None else number | _BEYOND[exceeded_limit]


def decode_connection(message: int) -> tuple[int, str | None]:
    """Split a message made by `encode_connection` into the connection's number and the limit that it
    exceeds, or None.
    """
    for beyond, flag in _BEYOND.items():
        if message < _SPECIAL and message & flag:
            return message ^ flag, beyond
    return message, None


class ReportWriter:
    """A writer of a serving process's messages to the supervisor.  Messages that cannot be sent at once are
    queued in order.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent = bytearray()

    @property
    def is_backlogged(self) -> bool:
        """Whether messages wait because the other side has not read earlier ones."""
        return bool(self._unsent)

    def send_report(self, number: int) -> None:
        """Send a message (one number) to the supervisor, or queue it until the socket is writable."""
        was_waiting = bool(self._unsent)
        self._unsent += MESSAGE.pack(number)
        if not was_waiting:
            self._flush()
            if self._unsent:
                asyncio.get_running_loop().add_writer(self._channel, self._on_writable)

    def _on_writable(self) -> None:
        """Send queued bytes, and stop waiting for the socket once all are sent."""
        self._flush()
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._channel)

    def _flush(self) -> None:
        """Send as many queued bytes as the socket accepts; discard all if the supervisor has ended."""
        try:
            del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The other process has ended, and this one is about to end.
            self._unsent.clear()


class ReportReader:
    """A parser of the byte stream from a serving process, in which each message is a number of eight bytes."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[int]:
        """Return the messages (numbers) that these bytes complete; keep the bytes of an incomplete one for the
        next call.
        """
        buffered = self._incomplete + data
        end = len(buffered) - len(buffered) % MESSAGE.size
        self._incomplete = buffered[end:]
        return [number for (number,) in MESSAGE.iter_unpack(buffered[:end])]


def send_with_socket(channel: socket.socket, number: int, connection: socket.socket | None = None) -> bool:
    """Send a message (one number), with the descriptor of `connection` if one is given; return whether it
    could be sent.
    """
    descriptors = [] if connection is None else [connection.fileno()]
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [MESSAGE.pack(number)], descriptors)
        return True
    return False


def receive_message(channel: socket.socket) -> tuple[int, list[int]] | None:
    """Return the next message (one number) with its file descriptors; None if the other process has ended.

    Raises:
        BlockingIOError: there is no message now.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 1)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if len(data) < MESSAGE.size:
        return None
    return MESSAGE.unpack(data)[0], list(descriptors)


class SupervisorChannel:
    """A serving process's end of its connection to the supervisor.  It receives clients' connections, and reports
    whether the process is ready.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        is_stalled: Callable[[], bool],
        on_connection: Callable[[socket.socket, Callable[[], None], str | None], None],
        on_refused: Callable[[str], None],
        on_restarted: Callable[[int], None],
        on_link: Callable[[socket.socket], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Args:
        is_stalled: whether this process finishes no operations, even if it is ready.
        on_connection: serves a connection; calls its second argument when the connection has ended.  The third
            one is the limit that the connection exceeds, None if there is none.
        on_refused: called when the other process refused a connection; the argument names the setting.
        on_restarted: called when another child of the supervisor was started again, with its index in
            `FleetPosition.children`.
        on_link: receives one end of the link between a front end and a process that owns a device.
        on_closed: called when the other process has ended.
        """
        self._channel = channel
        self._report_writer = ReportWriter(channel)
        self._is_stalled = is_stalled
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._on_restarted = on_restarted
        self._on_link = on_link
        self._on_closed = on_closed
        self._is_ready = False
        self._throttled_log = ThrottledLogger(log)

    def start(self) -> None:
        """Start to receive connections, and to report readiness every half second."""
        add_persistent_reader(asyncio.get_running_loop(), self._channel, self._receive_from_supervisor)
        self._report_readiness_regularly()

    def report_readiness(self, *, ready: bool) -> None:
        """Set whether this process is ready, and report it to the supervisor now and every half second."""
        self._is_ready = ready
        self._send_readiness()

    def report_refused_connection(self, reason: str) -> None:
        """Report to the supervisor that this process refused a connection because of a limit; `reason` names the
        limit.
        """
        self._report_writer.send_report(REFUSED[reason])

    def request_link(self) -> None:
        """Ask the supervisor for new links between this front end and the processes that own devices, after one
        was lost.
        """
        self._report_writer.send_report(LINK)

    def _receive_from_supervisor(self) -> None:
        """Receive one message from the supervisor: a connection, a link to another process, or a refusal to
        count.  When the supervisor has ended, call `on_closed`.
        """
        try:
            received = receive_message(self._channel)
        except BlockingIOError:
            return
        if received is None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._on_closed()
            return
        message, descriptors = received
        number, beyond = decode_connection(message)
        if (reason := _REASONS.get(number)) is not None:
            self._on_refused(reason)
        elif RESTARTED <= number < LINK:
            self._on_restarted(number - RESTARTED)
        elif not descriptors:
            self._throttled_log.warning("a connection was lost: no descriptor is free")
            if number != LINK:
                self._report_writer.send_report(number)
            # The connection has ended; for a link: another one is needed.
            self._report_writer.send_report(number)
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            if number == LINK:
                self._on_link(connection)
                continue
            # The connection is received: if this process ends now, the connection ends with it.
            self._report_writer.send_report(number)
            self._on_connection(connection, functools.partial(self._report_writer.send_report, number), beyond)

    def _report_readiness_regularly(self) -> None:
        """Report readiness every half second, which also shows that the event loop runs.  Skip a report while
        earlier ones are unsent.
        """
        if not self._report_writer.is_backlogged:
            self._send_readiness()
        asyncio.get_running_loop().call_later(BEAT_S, self._report_readiness_regularly)

    def _send_readiness(self) -> None:
        """Report READY if this process is ready and finishes operations, else NOT_READY."""
        self._report_writer.send_report(READY if self._is_ready and not self._is_stalled() else NOT_READY)
