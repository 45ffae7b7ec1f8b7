"""Where and how to connect; the connecting itself is in `connection`, the waiting in who drives it."""

import socket
import ssl
from collections.abc import Sequence
from typing import Any

import httpx

from normserve.client.http.address import Address

#: A place to connect to: the family of its socket, and where.
Place = tuple[socket.AddressFamily, Any]

# Of a host with more addresses, one that does not answer takes no more time than this.
_FIRST_TRIES_S = 3.0


def places(found: Sequence[tuple[Any, ...]]) -> list[Place]:
    """The places of what `getaddrinfo` found, each once."""
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def unconnected(family: socket.AddressFamily) -> socket.socket:
    """A socket that does not block.

    Raises:
        OSError: there are too many.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if family != socket.AF_UNIX:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def encrypted(connected: socket.socket, address: Address, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connected socket with TLS, whose handshake is still to be done; the one that was given is used up."""
    return context.wrap_socket(connected, server_hostname=address.host, do_handshake_on_connect=False)


def patience_s(left_s: float | None, *, is_last: bool) -> float | None:
    """How long to try one place."""
    if is_last:
        return left_s
    return _FIRST_TRIES_S if left_s is None else min(left_s, _FIRST_TRIES_S)


class Trust:
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
