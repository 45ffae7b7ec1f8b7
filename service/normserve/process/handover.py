"""What the process that accepts and those that serve say to one another, over a pair of stream sockets.

Every message is one number of eight bytes.  A connection is handed over under a number that no other has.  The
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
"""A process that serves can take connections, or cannot: told as soon as it changes, and every `BEAT_S`."""

BEAT_S = 0.5

REFUSED = {
    "max_connections": 2**64 - 3,
    "max_connections_per_address": 2**64 - 4,
    "local_connections": 2**64 - 5,
}
"""The process that accepts has refused a connection: the others have the metrics."""


LINK = 2**64 - 6
"""What comes along is no connection of a client's, but the way from a front end to a process that owns a device."""


class Reports:
    """Messages of a process that serves, in order, none of them lost while the other side is busy."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent = bytearray()

    @property
    def is_behind(self) -> bool:
        """The other side has not taken everything yet."""
        return bool(self._unsent)

    def send(self, number: int) -> None:
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
            # The other process is gone, and this one is about to end.
            self._unsent.clear()


class Heard:
    """Messages as they come out of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        whole = self._rest + data
        end = len(whole) - len(whole) % MESSAGE.size
        self._rest = whole[end:]
        return [number for (number,) in MESSAGE.iter_unpack(whole[:end])]


def hand_over(channel: socket.socket, number: int, connection: socket.socket | None = None) -> bool:
    """Send a message, and a connection with it; whether it could be sent."""
    descriptors = [] if connection is None else [connection.fileno()]
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [MESSAGE.pack(number)], descriptors)
        return True
    return False


def receive(channel: socket.socket) -> tuple[int, list[int]] | None:
    """The next message and the descriptors that came with it; None where the other process is gone.

    Raises:
        BlockingIOError: there is none.
    """
    try:
        said, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 1)
    except BlockingIOError:
        raise
    except OSError:
        return None
    if len(said) < MESSAGE.size:
        return None
    return MESSAGE.unpack(said)[0], list(descriptors)
