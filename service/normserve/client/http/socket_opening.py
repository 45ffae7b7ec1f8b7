"""Steps for opening a connection; the code that drives them waits."""

import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import httpx

from normserve.client.http.server_address import ServerAddress
from normserve.client.http.socket_steps import READ, WRITE, Steps

#: An address to connect to: the socket's family, and the address in that family.
Place = tuple[socket.AddressFamily, Any]

# TCP grows its buffers by itself, up to about this; the operating system may allow less.
_UNIX_BUFFER_BYTES = 4 * 2**20

# Of a host with several addresses, each but the last is tried for at most this long.
_FIRST_TRIES_S = 3.0


def list_socket_addresses(found: Sequence[tuple[Any, ...]]) -> list[Place]:
    """Return the distinct addresses in the result of `getaddrinfo`."""
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def make_socket(family: socket.AddressFamily) -> socket.socket:
    """Make a non-blocking socket, with a large send buffer for a Unix socket and without Nagle's delay for TCP.

    Raises:
        OSError: too many descriptors are open.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if family == socket.AF_UNIX:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def wrap_tls(connected: socket.socket, address: ServerAddress, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Wrap a connected socket in TLS, with the handshake still to do; the given socket is unusable afterwards."""
    return context.wrap_socket(connected, server_hostname=address.host, do_handshake_on_connect=False)


def connect(unconnected: socket.socket, where: Any) -> Steps[None]:
    """Connect a non-blocking socket; the generator pauses where the caller must wait for the socket.

    Raises:
        OSError: the connection cannot be made.
    """
    try:
        unconnected.connect(where)
    except BlockingIOError:
        # A Unix socket accepts a connection at once, or its backlog is full.
        if unconnected.family == socket.AF_UNIX:
            raise
        yield unconnected.fileno(), WRITE
        if error := unconnected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, f"connecting failed: {os.strerror(error)}") from None


def do_handshake(connected: ssl.SSLSocket) -> Steps[None]:
    """Do the TLS handshake of a non-blocking socket; the generator pauses where the caller must wait for the
    socket.

    Raises:
        OSError: the handshake failed.
    """
    while True:
        try:
            connected.do_handshake()
            return
        except ssl.SSLWantReadError:
            yield connected.fileno(), READ
        except ssl.SSLWantWriteError:
            yield connected.fileno(), WRITE


def compute_attempt_s(remaining_s: float | None, *, is_last: bool) -> float | None:
    """Return how many seconds the attempt to connect to one of a server's addresses may take.  None means no limit.

    All addresses but the last get a short time, so that an unreachable one does not use up the deadline.
    """
    if is_last:
        return remaining_s
    return _FIRST_TRIES_S if remaining_s is None else min(remaining_s, _FIRST_TRIES_S)


class TlsSettings:
    """The TLS settings of a client's connections; the context, slow to make, is made at its first use."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        """Args: verify: as in httpx."""
        self._verify = verify
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context of every connection."""
        if self._context is None:
            verify = self._verify
            context = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
            # Of the protocols that a server may choose, this is spoken here.
            context.set_alpn_protocols(["http/1.1"])
            self._context = context
        return self._context
