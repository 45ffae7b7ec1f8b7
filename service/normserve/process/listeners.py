"""The sockets that the server listens on."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from normserve.settings import Settings

_BACKLOG = 2048


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Every address of the host at the port, then the Unix socket; closed, and its path removed, at the end.

    Raises:
        OSError: an address is in use, or not this host's.
    """
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        port = settings.port
        found = socket.getaddrinfo(settings.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
            listeners.append(stack.enter_context(bound))
            # A port that the system chose is the same at the host's other addresses.
            port = bound.getsockname()[1]
        if settings.uds is not None:
            listeners.append(stack.enter_context(_listening_at(settings.uds)))
            stack.callback(settings.uds.unlink, missing_ok=True)
        for listener in listeners:
            listener.setblocking(False)
        yield listeners


def _listening_at(path: Path) -> socket.socket:
    """A socket that an earlier process left there is replaced, nothing else is."""
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, *, encrypted: bool) -> str:
    """Where clients on this host reach it."""
    host, port = listener.getsockname()[:2]
    # A server that listens everywhere is reached here by the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
