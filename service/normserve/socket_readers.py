"""Monitoring of sockets by an event loop, also of those whose peer has closed.

A Unix socket has an error, ECONNRESET, once its peer has closed without having read everything; what the peer had
sent before is received first.  uvloop (libuv) calls back once for a socket with an error and then monitors it no
more, so the rest of the bytes and the end would never be received.  asyncio's own loops call back until the end.
"""

import asyncio
import select
import socket
from collections.abc import Callable


def add_reader(loop: asyncio.AbstractEventLoop, connected: socket.socket, receive: Callable[[], object]) -> None:
    """Call `receive` while there is something to receive, the end included, until the loop's `remove_reader`."""
    loop.add_reader(connected, _rearm_and_receive, loop, connected, receive, _make_end_poll(connected.fileno()))


def has_error(descriptor: int) -> bool:
    """Whether a socket has an error that has not been received yet."""
    return any(events & select.POLLERR for _, events in _make_end_poll(descriptor).poll(0))


def has_ended(descriptor: int) -> bool:
    """Whether the peer of a socket has closed it, whatever of its bytes is still to be received."""
    return any(events & select.POLLHUP for _, events in _make_end_poll(descriptor).poll(0))


def _rearm_and_receive(
    loop: asyncio.AbstractEventLoop, connected: socket.socket, receive: Callable[[], object], end: "select.poll"
) -> None:
    # First, because `receive` may end it.  uvloop has one monitor for a socket's reader and writer, and there is
    # nothing left to write for: a peer that has closed takes no more bytes.
    if end.poll(0):
        loop.remove_reader(connected)
        loop.remove_writer(connected)
        add_reader(loop, connected, receive)
    receive()


def _make_end_poll(descriptor: int) -> "select.poll":
    """What tells of a socket's errors and of its peer's end, and of nothing else."""
    end = select.poll()
    end.register(descriptor, 0)
    return end
