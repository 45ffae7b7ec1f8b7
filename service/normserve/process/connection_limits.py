"""Limits on the number of open connections, in total and from one address.

A few more are accepted beyond a limit: each takes the place of an idle connection, or is for a probe only.  All
others are refused.  The process that accepts connections counts them: the server itself, or the supervisor of
several processes.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from normserve.codec.forwarded_for import TrustedProxies
from normserve.errors import NormserveError, TooManyConnectionsError
from normserve.http.problem_responses import render_problem_response
from normserve.ip_addresses import format_client_network
from normserve.logs.formatting import ThrottledLogger

log = logging.getLogger(__name__)

Reason = Literal["max_connections", "max_connections_per_address", "local_connections"]

# Descriptors besides clients' connections: the server's own sockets, files, the device's libraries.
_OTHER_DESCRIPTORS = 256
# A refused client may still be sending its request; closing at once would reset the response before it is read.
_LINGER_S = 1.0
RESERVE = 64
"""Number of connections that are accepted beyond a limit."""
_MAX_LINGERING = 64
_PAUSE_S = 0.1


class AcceptedConnection(NamedTuple):
    """The client's address and the exceeded limit of a connection that was accepted and counted.

    Attributes:
        address: the key under which the connection is counted, for `release_connection`.
        exceeded_limit: the limit that it exceeds; None if there is none.
    """

    address: str
    exceeded_limit: Reason | None


Take = Callable[[socket.socket, AcceptedConnection], Awaitable[None]]


class ConnectionLimits:
    """The numbers of open connections, in total and by client address, and their limits.

    Attributes:
        open_count: number of connections that were admitted and have not ended.
        max_connections: limit on `open_count`.
    """

    def __init__(
        self,
        *,
        max_all: int,
        max_per_address: int,
        on_refused: Callable[[Reason], None],
        reserve: int = RESERVE,
        address_limit_name: Reason = "max_connections_per_address",
        render_refusal: Callable[[NormserveError], bytes] = render_problem_response,
        proxies: TrustedProxies | None = None,
    ) -> None:
        """Args:
        reserve: number of connections that are accepted beyond each limit.
        address_limit_name: the setting that defines `max_per_address`.
        render_refusal: makes the response to a refused client.
        proxies: those whose connections are of many clients, and have no limit of an address.
        """
        self.open_count = 0
        self._extra_connections = reserve
        self._address_limit = address_limit_name
        self._render_refusal = render_refusal
        self._proxies = proxies
        self.max_connections = max_all
        self._max_per_address = max_per_address
        self._on_refused = on_refused
        self._counts_by_address: dict[str, int] = {}
        self._lingering_count = 0
        self._exceeded_log, self._refused_log, self._failed_log = (
            ThrottledLogger(log),
            ThrottledLogger(log),
            ThrottledLogger(log),
        )

    def try_admit_connection(self, connection: socket.socket) -> AcceptedConnection | None:
        """Count a new connection, or refuse and close it; return None if it is refused.  A small reserve is
        admitted beyond each limit, with `exceeded_limit` set.
        """
        address = identify_client(connection)
        of_address = self._counts_by_address.get(address, 0)
        is_proxy = self._proxies is not None and self._proxies.is_proxy(_get_peer_address(connection))
        limited_count = 0 if is_proxy else of_address
        beyond: Reason | None = None
        for reason, count, limit in (
            (self._address_limit, limited_count, self._max_per_address),
            ("max_connections", self.open_count, self.max_connections),
        ):
            if count >= limit + self._extra_connections:
                self._respond_and_close_later(connection, reason, limit)
                return None
            if count >= limit and beyond is None:
                beyond = reason
                self._exceeded_log.warning("a connection is beyond the limit: %s is %d", reason, limit)
        self.open_count += 1
        self._counts_by_address[address] = of_address + 1
        return AcceptedConnection(address, beyond)

    def release_connection(self, address: str) -> None:
        """Subtract an ended connection from the counts, in total and of this address."""
        self.open_count -= 1
        remaining_count = self._counts_by_address[address] - 1
        if remaining_count:
            self._counts_by_address[address] = remaining_count
        else:
            del self._counts_by_address[address]

    async def accept_connections(self, listener: socket.socket, take: Take) -> None:
        """Accept connections until cancelled, and pass each admitted one to `take`.

        Args:
            take: owns the connection from then on, and must call `release_connection` when it has ended.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # For example out of descriptors: connections wait in the operating system until some are free.
                self._failed_log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.setblocking(False)
            admission = self.try_admit_connection(connection)
            if admission is not None:
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await take(connection, admission)
            # `sock_accept` does not yield while connections wait: let other tasks run.
            await asyncio.sleep(0)

    def _respond_and_close_later(self, connection: socket.socket, reason: Reason, limit: int) -> None:
        """Send an error response and close the connection a second later, so that the client can read the
        response.  If many refused connections wait already, close it at once.
        """
        self._on_refused(reason)
        self._refused_log.warning("a connection was refused: %s is %d", reason, limit)
        with contextlib.suppress(OSError):
            connection.send(self._render_refusal(TooManyConnectionsError(reason)))
            connection.shutdown(socket.SHUT_WR)
        if self._lingering_count >= _MAX_LINGERING:
            _drain_and_close(connection)
            return
        self._lingering_count += 1
        asyncio.get_running_loop().call_later(_LINGER_S, self._close_lingering, connection)

    def _close_lingering(self, connection: socket.socket) -> None:
        """Close a refused connection whose client has had time to read the error response."""
        self._lingering_count -= 1
        _drain_and_close(connection)


def _drain_and_close(connection: socket.socket) -> None:
    """Close a refused connection.  Unread bytes are received first, since they would make the operating system
    discard the response.
    """
    with connection, contextlib.suppress(OSError):
        connection.recv(65536)


def identify_client(connection: socket.socket) -> str:
    """Return the name under which a client's connections are counted.  This is an IPv4 address, an IPv6 /64
    network, or for a Unix socket the user id.
    """
    try:
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"uid {struct.unpack('3i', credentials)[1]}"
    except OSError:
        return "gone"
    peer = _get_peer_address(connection)
    if not peer:
        return "gone"
    return format_client_network(peer) if ":" in peer else peer


def _get_peer_address(connection: socket.socket) -> str:
    """Return the IP address of a connection's client.

    It is an empty string on a Unix socket, and if the client has left.
    """
    if connection.family == socket.AF_UNIX:
        return ""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return ""


def raise_descriptor_limit_for_connections(wanted: int, *, outgoing: int = 0) -> int:
    """Raise the process's soft limit of open files so that `wanted` connections fit, at most to the hard limit.

    Args: outgoing: number of connections that the process itself may open.

    Returns:
        The number of connections that the process may hold: `wanted`, or fewer if the hard limit is lower.
    """
    available, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = _OTHER_DESCRIPTORS + RESERVE + outgoing
    needed = wanted + others
    if available == resource.RLIM_INFINITY:
        available = needed
    elif available < needed and available != hard:
        available = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (available, hard))
    possible = available - min(others, available // 2)
    if possible < wanted:
        log.warning("%d connections are served at once: the limit of descriptors allows no more", possible)
    return min(wanted, possible)
