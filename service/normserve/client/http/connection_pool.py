"""Connection pool and socket waits for threads."""

import math
import os
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import TypeVar

import httpx

from normserve.client.deadlines import Deadline
from normserve.client.http.connection import BlockingReceive, ClientHttpConnection
from normserve.client.http.idle_connections import IdleConnectionStack
from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_opening import (
    Place,
    TlsSettings,
    compute_attempt_s,
    connect,
    do_handshake,
    list_socket_addresses,
    make_socket,
    wrap_tls,
)
from normserve.client.http.socket_steps import Steps

R = TypeVar("R")

# A poll's time is a C int of milliseconds.
_LONGEST_S = 2.0**31 / 1000 - 1


# One send call waits at most so long; between calls, early responses and the deadline are checked.
_SENDING_S = 0.02
# One receive call waits at most so long; the timeout is set once, and anew only when less time is left.
_RECEIVING_S = 1.0

_LATE = "there was no more time"

_ALL: int = getattr(socket, "MSG_WAITALL", 0)


class ConnectionPool:
    """A pool of HTTP connections to one server, which threads share; it starts empty in a forked process."""

    def __init__(self, address: ServerAddress, trust: TlsSettings, most: int, keep_s: float) -> None:
        """Args:
        address: of the server.
        trust: the TLS settings of the connections.
        most: connections in use at once; further callers wait.
        keep_s: seconds for which an idle connection is kept.
        """
        self._address = address
        self._tls_settings = trust
        self._max_connections = most
        self._idle_timeout_s = keep_s
        self._closed = False
        self._reset()

    def acquire(self, deadline: Deadline, *, fresh: bool = False) -> tuple[ClientHttpConnection, bool]:
        """Return an idle connection, or open one if none is idle.  If the maximum number of connections is in use,
        this waits until one is released.

        The caller must `release` the connection in any case.

        Args:
            deadline: of opening the connection, and of waiting for one in use.
            fresh: always open a new connection.

        Returns:
            the connection, and whether it was used before.

        Raises:
            RuntimeError: the pool is closed.
            httpx.ConnectError: the connection cannot be opened.
            httpx.TimeoutException: the deadline passed before.
        """
        if self._process_id != os.getpid():
            self._reset()
        free = self._free_slots
        remaining_s = deadline.get_remaining_s()
        # The operating system limits the timeouts of locks.
        if not free.acquire(
            timeout=None if remaining_s is None else max(0.0, min(remaining_s, threading.TIMEOUT_MAX))
        ):
            raise httpx.PoolTimeout(_LATE)
        try:
            if self._closed:
                raise RuntimeError("the client is closed")
            if not fresh and (idle_connection := self._idle.pop()) is not None:
                return idle_connection, True
            return self._open(deadline), False
        except BaseException:
            free.release()
            raise

    def release(self, connection: ClientHttpConnection) -> None:
        """End the use of a connection: keep it for later calls if it is reusable, otherwise close it."""
        if connection.is_reusable and not self._closed:
            self._idle.push(connection)
        else:
            connection.close()
        self._free_slots.release()

    def close(self) -> None:
        """Close all idle connections; a connection in use is closed when it is released."""
        self._closed = True
        self._idle.close_all()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._free_slots = threading.Semaphore(self._max_connections)
        self._idle = IdleConnectionStack(self._max_connections, self._idle_timeout_s)

    def _open(self, deadline: Deadline) -> ClientHttpConnection:
        """Open a connection to the first of the server's addresses that accepts one.

        Raises:
            httpx.ConnectError, httpx.ConnectTimeout: no address accepts a connection.
        """
        try:
            found = self._resolve_addresses()
            for place in found:
                try:
                    return self._open_at(place, deadline, is_last=place == found[-1])
                except (OSError, httpx.ConnectTimeout) as error:
                    failure = error
            raise failure if found else OSError("the host has no address")
        # A UnicodeError is a name of which no query can be made: a part of it is too long.
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{self._address.display_name}: {error}") from error

    def _resolve_addresses(self) -> list[Place]:
        """Return the addresses to try in turn: the path of the Unix socket, or those found for the host's name."""
        if self._address.socket_path is not None:
            return [(socket.AF_UNIX, self._address.socket_path)]
        return list_socket_addresses(
            socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        )

    def _open_at(self, place: Place, deadline: Deadline, *, is_last: bool) -> ClientHttpConnection:
        """Connect to one address, and do the TLS handshake if the server's URL is https.

        Without TLS the socket then becomes a blocking one, with short timeouts for sending and receiving.

        Args: is_last: whether no other address is left, so that connecting may take all of the remaining time.

        Raises:
            OSError, httpx.ConnectTimeout: the connection cannot be made, or not in time.
        """
        family, where = place
        late = httpx.ConnectTimeout
        made = make_socket(family)
        try:
            run_steps(
                connect(made, where), Deadline(compute_attempt_s(deadline.get_remaining_s(), is_last=is_last)), late
            )
            if self._address.is_tls:
                secured = wrap_tls(made, self._address, self._tls_settings.context)
                made = secured
                run_steps(do_handshake(secured), deadline, late)
            else:
                made.setblocking(True)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _pack_timeval(_SENDING_S))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeval(_RECEIVING_S))
            return ClientHttpConnection(made, blocks=not self._address.is_tls)
        except BaseException:
            made.close()
            raise


def make_blocking_receiver(deadline: Deadline) -> BlockingReceive:
    """Make a function that receives with blocking system calls until the deadline.

    A body takes one call, which wakes this thread only when the body is complete.
    """

    def receive_into(connected: socket.socket, view: memoryview, /, *, until_full: bool) -> int:
        flags = _ALL if until_full else 0
        while True:
            remaining_s = deadline.get_remaining_s()
            if remaining_s is None or remaining_s >= _RECEIVING_S:
                try:
                    return connected.recv_into(view, 0, flags)
                except BlockingIOError:
                    continue
            if remaining_s <= 0:
                raise httpx.ReadTimeout(_LATE)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeval(remaining_s))
            try:
                with suppress(BlockingIOError):
                    return connected.recv_into(view, 0, flags)
            finally:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeval(_RECEIVING_S))

    return receive_into


def _pack_timeval(seconds: float) -> bytes:
    """Pack seconds into the operating system's struct timeval."""
    whole_seconds = int(min(seconds, _LONGEST_S))
    return struct.pack("@ll", whole_seconds, max(1, int((min(seconds, _LONGEST_S) - whole_seconds) * 1e6)))


def run_steps(steps: Steps[R], deadline: Deadline, late: type[httpx.TimeoutException] = httpx.ReadTimeout) -> R:
    """Run a generator that pauses where it must wait for a socket, and return its result.  This thread waits for
    the socket.

    The generator yields a descriptor with the events to wait for, and is sent the events that occurred.

    Args:
        deadline: of all waits together.
        late: the exception to raise when the deadline passes.
    """
    try:
        descriptor, events = next(steps)
        while True:
            remaining_s = deadline.get_remaining_s()
            if remaining_s is not None and remaining_s <= 0:
                raise late(_LATE)
            poll = select.poll()
            poll.register(descriptor, events)
            ready = poll.poll(None if remaining_s is None else math.ceil(min(remaining_s, _LONGEST_S) * 1000))
            if ready:
                descriptor, events = steps.send(ready[0][1])
            elif remaining_s is not None and remaining_s <= _LONGEST_S:
                raise late(_LATE)
    except StopIteration as stop:
        result: R = stop.value
        return result
    finally:
        steps.close()
