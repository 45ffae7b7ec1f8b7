"""The sockets that the server listens on."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from normserve.local.peer import Users
from normserve.settings import Settings

_BACKLOG = 2048


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Listeners at every address of the host, then at the Unix socket; closed, and its path removed, at the end.

    Raises:
        OSError: an address is in use, or does not belong to this host.
    """
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        port = settings.port
        found = socket.getaddrinfo(settings.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
            listeners.append(stack.enter_context(bound))
            # If the system chose the port, the other addresses use the same one.
            port = bound.getsockname()[1]
        if settings.uds is not None:
            listeners.append(stack.enter_context(_listening_at(settings.uds)))
            stack.callback(settings.uds.unlink, missing_ok=True)
        for listener in listeners:
            listener.setblocking(False)
        yield listeners


@contextlib.contextmanager
def listening_locally(settings: Settings) -> Iterator[socket.socket]:
    """The Unix socket for clients that share memory; closed, and its path removed, at the end.

    Raises:
        OSError: the path cannot be bound.
    """
    path = settings.local
    assert path is not None
    with _listening_at(path, 0o600) as listener:
        if Users(settings.local_users).are_several:
            path.chmod(0o666)
        listener.setblocking(False)
        yield listener
    path.unlink(missing_ok=True)


def is_local(connection: socket.socket, settings: Settings) -> bool:
    """Whether an accepted connection was made to the socket for clients that share memory."""
    return connection.family == socket.AF_UNIX and connection.getsockname() == str(settings.local)


def _listening_at(path: Path, mode: int = 0o777) -> socket.socket:
    """Listen at a path; a socket that an earlier process left there is replaced, any other file is not.

    Args: mode: of the path, before the process's umask applies.
    """
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        # Before a client can connect: Linux creates the path with the mode of the socket.
        os.fchmod(listener.fileno(), mode)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, *, encrypted: bool) -> str:
    """The URL at which clients on this host reach a listener."""
    host, port = listener.getsockname()[:2]
    # A server that listens on all addresses is reached from this host by the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
