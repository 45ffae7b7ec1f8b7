"""Monitoring of sockets by an event loop, also of those whose peer has closed.

A Unix socket has an error, ECONNRESET, once its peer has closed without having read everything; what the peer had
sent before is received first.  uvloop (libuv) calls back once for a socket with an error and then monitors it no
more, so the rest of the bytes and the end would never be received.  asyncio's own loops call back until the end.
"""

import asyncio
import select
import socket
from collections.abc import Callable


def add_persistent_reader(
    loop: asyncio.AbstractEventLoop, connected: socket.socket, receive: Callable[[], object]
) -> None:
    """Register `receive`, to be called whenever a socket has bytes to receive or its peer has closed.  It remains
    registered until the loop's `remove_reader`, with uvloop even after a socket error.
    """
    loop.add_reader(connected, _rearm_and_receive, loop, connected, receive, _make_end_poll(connected.fileno()))


def has_error(descriptor: int) -> bool:
    """Return whether a socket has an error that has not been reported to a call yet."""
    return any(events & select.POLLERR for _, events in _make_end_poll(descriptor).poll(0))


def has_ended(descriptor: int) -> bool:
    """Return whether a socket's peer has closed the connection, even if bytes from the peer are still unread."""
    return any(events & select.POLLHUP for _, events in _make_end_poll(descriptor).poll(0))


def _rearm_and_receive(
    loop: asyncio.AbstractEventLoop, connected: socket.socket, receive: Callable[[], object], end: "select.poll"
) -> None:
    """Call `receive`.  Before that, if the peer has closed or the socket has an error, add the reader again,
    because uvloop then removes it.
    """
    # First, because `receive` may end it.  uvloop has one monitor for a socket's reader and writer, and there is
    # nothing left to write for: a peer that has closed takes no more bytes.
    if end.poll(0):
        loop.remove_reader(connected)
        loop.remove_writer(connected)
        add_persistent_reader(loop, connected, receive)
    receive()


def _make_end_poll(descriptor: int) -> "select.poll":
    """Make a poll object that reports only a socket's errors and its peer's end."""
    end = select.poll()
    end.register(descriptor, 0)
    return end
