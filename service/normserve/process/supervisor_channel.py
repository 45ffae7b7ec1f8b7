"""Messages between the process that accepts connections and those that serve them, over a stream socket pair.

Every message is one number of eight bytes.  A connection is handed over with a unique number.  The
process that serves sends that number back twice: when it has received the connection, and when the connection has
ended.  Until the first of these the process that accepted the connection keeps it open as well, and hands it to
another process if this one ends.
"""

import asyncio
import contextlib
import socket
import struct

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

_BEYOND = {"max_connections": 2**62, "max_connections_per_address": 2**61}
# Numbers that are no connection's begin here.
_SPECIAL = 2**63

LINK = 2**64 - 6
"""The message whose socket is a link between a front end and a process that owns a device, not a client's
connection.
"""


def encode_connection(number: int, beyond: str | None) -> int:
    """Encode a connection's number, with the limit that it exceeds, as a message."""
    return number if beyond is None else number | _BEYOND[beyond]


def decode_connection(message: int) -> tuple[int, str | None]:
    """Decode a message of `encode_connection`: the connection's number, and the limit that it exceeds."""
    for beyond, flag in _BEYOND.items():
        if message < _SPECIAL and message & flag:
            return message ^ flag, beyond
    return message, None


class ReportWriter:
    """A queue of messages from a serving process, sent in order; none is lost while the other side is busy."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent = bytearray()

    @property
    def is_backlogged(self) -> bool:
        """Whether messages wait because the other side has not read earlier ones."""
        return bool(self._unsent)

    def send_report(self, number: int) -> None:
        was_waiting = bool(self._unsent)
        self._unsent += MESSAGE.pack(number)
        if not was_waiting:
            self._flush()
            if self._unsent:
                asyncio.get_running_loop().add_writer(self._channel, self._on_writable)

    def _on_writable(self) -> None:
        self._flush()
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._channel)

    def _flush(self) -> None:
        try:
            del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The other process has ended, and this one is about to end.
            self._unsent.clear()


class ReportReader:
    """A parser that splits a stream into messages."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[int]:
        buffered = self._incomplete + data
        end = len(buffered) - len(buffered) % MESSAGE.size
        self._incomplete = buffered[end:]
        return [number for (number,) in MESSAGE.iter_unpack(buffered[:end])]


def send_with_socket(channel: socket.socket, number: int, connection: socket.socket | None = None) -> bool:
    """Send a message, and a connection with it; return whether it could be sent."""
    descriptors = [] if connection is None else [connection.fileno()]
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [MESSAGE.pack(number)], descriptors)
        return True
    return False


def receive_message(channel: socket.socket) -> tuple[int, list[int]] | None:
    """Receive the next message and its descriptors; None if the other process has ended.

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
