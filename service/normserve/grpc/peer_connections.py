"""The connections of clients, as far as gRPC does not manage them."""

import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import unquote

from normserve.ip_addresses import parse_ip_address


def parse_peer(peer: str) -> tuple[str, int | None]:
    """Return the IP address and the port in gRPC's name of a peer, or `unix` and None.

    Args: peer: such as `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "unix", None
    host, _, port = rest.rpartition(":")
    return host.strip("[]").partition("%")[0], int(port)


def close_connection(peer: str) -> None:
    """Close the connection of a peer, which ends all its calls.

    gRPC cannot end a call whose response is not read: the status would have to wait until it is.

    Args: peer: as gRPC names it.
    """
    host, port = parse_peer(peer)
    if port is None:
        return
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The number may be closed, and be another file's, at any time: a duplicate stays what it is.
        with contextlib.suppress(OSError):
            duplicate = os.dup(int(entry.name))
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with connection:
                name = connection.getpeername()
                if name[1:2] == (port,) and parse_ip_address(name[0].partition("%")[0]) == parse_ip_address(host):
                    connection.shutdown(socket.SHUT_RDWR)
