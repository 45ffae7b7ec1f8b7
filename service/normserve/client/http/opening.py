"""Where and how to connect; the waiting is in who drives it."""

import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import httpx

from normserve.client.http.address import ServerAddress
from normserve.client.http.steps import READ, WRITE, Steps

#: A place to connect to: the family of its socket, and where.
Place = tuple[socket.AddressFamily, Any]

# TCP grows its buffers by itself, up to about this; the kernel may allow less.
_UNIX_BUFFER_BYTES = 4 * 2**20

# Of a host with more addresses, one that does not answer takes no more time than this.
_FIRST_TRIES_S = 3.0


def list_socket_addresses(found: Sequence[tuple[Any, ...]]) -> list[Place]:
    """The places of what `getaddrinfo` found, each once."""
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def make_socket(family: socket.AddressFamily) -> socket.socket:
    """A socket that does not block.

    Raises:
        OSError: there are too many.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if family == socket.AF_UNIX:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def wrap_tls(connected: socket.socket, address: ServerAddress, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connected socket with TLS, whose handshake is still to be done; the one that was given is used up."""
    return context.wrap_socket(connected, server_hostname=address.host, do_handshake_on_connect=False)


def connect(unconnected: socket.socket, where: Any) -> Steps[None]:
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


def do_handshake(connected: ssl.SSLSocket) -> Steps[None]:
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


def compute_attempt_s(left_s: float | None, *, is_last: bool) -> float | None:
    """How long to try one place."""
    if is_last:
        return left_s
    return _FIRST_TRIES_S if left_s is None else min(left_s, _FIRST_TRIES_S)


class TlsSettings:
    """Whom connections with TLS believe; made when the first one needs it, which takes a while."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        """Args: verify: as httpx has it."""
        self._verify = verify
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """For every connection."""
        if self._context is None:
            verify = self._verify
            context = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
            # Of the protocols that a server may choose, this is spoken here.
            context.set_alpn_protocols(["http/1.1"])
            self._context = context
        return self._context
