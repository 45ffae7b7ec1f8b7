"""The sockets that the server listens on, and the message that announces their URL."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from normserve.http.curl import make_sample_command
from normserve.local.local_session import AllowedLocalUsers
from normserve.settings import Settings

_BACKLOG = 2048


class ListenError(OSError):
    """The server cannot listen at an address or a path; the message names the setting, or the folder for temporary
    files.
    """


@contextlib.contextmanager
def make_socket_folder() -> Iterator[Path]:
    """Make a folder for sockets between the server's processes, which only the server's user may enter.  At the
    end it is removed.

    Raises:
        ListenError: no folder for temporary files can be written.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="normserve-")
    except OSError as error:
        raise ListenError(
            f"its processes need a folder for sockets, such as /tmp or that of TMPDIR: {error.strerror or error}"
        ) from error
    with folder as path:
        yield Path(path)


@contextlib.contextmanager
def open_listeners(settings: Settings) -> Iterator[list[socket.socket]]:
    """Listen at every address of the host and at the optional Unix socket, and yield the listeners.  At the
    end they are closed and the socket's path is removed.

    For the gateway of gRPC there is a Unix socket in any case.

    Raises:
        ListenError: an address is in use or cannot be bound, or there is no folder for the gateway's socket.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _open_tcp_listeners(settings)]
        path = settings.uds
        if path is None and settings.grpc_port is not None:
            # For the gateway alone.
            path = stack.enter_context(make_socket_folder()) / "http.sock"
        if path is not None:
            listeners.append(stack.enter_context(_open_unix_listener("uds", path)))
        for listener in listeners:
            listener.setblocking(False)
        yield listeners


@contextlib.contextmanager
def open_local_listener(settings: Settings) -> Iterator[socket.socket]:
    """Listen at the Unix socket for clients that share memory, and yield the listener.  At the end it is
    closed and its path is removed.

    Raises:
        ListenError: another server listens at the path, or it cannot be bound.
    """
    path = settings.local
    assert path is not None
    with _open_unix_listener("local", path, 0o600) as listener:
        if AllowedLocalUsers(settings.local_users).has_other_users:
            path.chmod(0o666)
        listener.setblocking(False)
        yield listener


def is_local_connection(connection: socket.socket, settings: Settings) -> bool:
    """Return whether an accepted connection was made to the socket for clients that share memory."""
    return connection.family == socket.AF_UNIX and connection.getsockname() == str(settings.local)


def _open_tcp_listeners(settings: Settings) -> Iterator[socket.socket]:
    """Yield a listener at each address of the host.  With port 0, all have the port that the system chose
    for the first.
    """
    port = settings.port
    # All addresses of IPv6 are taken to mean all of IPv4 too, which has a socket of its own: through one of IPv6,
    # clients would have other addresses in logs, limits and shares.
    host = None if settings.host in ("", "::") else settings.host
    with _convert_to_listen_error("host", settings.host):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        with _convert_to_listen_error("host", f"{settings.host} --port {port}"):
            listener = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
        # If the system chose the port, the other addresses use the same one.
        port = listener.getsockname()[1]
        yield listener


@contextlib.contextmanager
def _open_unix_listener(option: str, path: Path, mode: int = 0o777) -> Iterator[socket.socket]:
    """Listen at a path, which is removed at the end unless another file has replaced it.

    A socket that an ended server left there is replaced; that of a running one, and any other file, is not.

    Args:
        option: the setting that names the path, for errors.
        mode: of the path, before the process's umask applies.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        with _convert_to_listen_error(option, path):
            if _is_stale_socket(path):
                path.unlink()
            # Before a client can connect: Linux creates the path with the mode of the socket.
            os.fchmod(listener.fileno(), mode)
            listener.bind(str(path))
            bound = path.lstat()
            listener.listen(_BACKLOG)
        try:
            yield listener
        finally:
            # Before the listener is closed: until then, no other file can have its inode.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), bound):
                    path.unlink()


def _is_stale_socket(path: Path) -> bool:
    """Return whether the path is a socket that an ended server left; False if it is no socket.

    Raises:
        OSError: a process listens there, or that cannot be found out.
    """
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            # Its queue is full.
            pass
    raise OSError("another server listens there; stop it first, or choose another path")


@contextlib.contextmanager
def _convert_to_listen_error(option: str, value: object) -> Iterator[None]:
    """Convert an OSError or UnicodeError raised in the block to a `ListenError` that names the setting and
    its value.
    """
    try:
        yield
    except UnicodeError as error:
        raise ListenError(f"--{option} {value}: this is no host's name") from error
    except OSError as error:
        raise ListenError(f"--{option} {value}: {error.strerror or error}") from error


def make_url(listener: socket.socket, *, encrypted: bool) -> str:
    """Return the URL at which clients on this host reach a TCP listener."""
    host, port = listener.getsockname()[:2]
    # A server that listens on all addresses is reached from this host by the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def print_url_and_example(settings: Settings, url: str) -> None:
    """Print the server's URL and an example curl command; print nothing if the log format is JSON."""
    if settings.log_format == "json":
        return
    with_key = settings.api_key is not None or settings.api_keys_file is not None
    example = make_sample_command(
        url, with_key=with_key, with_certificate=settings.tls_client_ca is not None, with_headers=True
    )
    print(f"\nPOST a tensor to {url}/v1/layer_norm, for example:\n\n  {example}\n", flush=True)
