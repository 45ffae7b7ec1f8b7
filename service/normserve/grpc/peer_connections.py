"""The connections of clients, as far as gRPC does not manage them."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from normserve.ip_addresses import parse_ip_address

# Looking at all open files takes some 10 ms for a thousand connections, in which no call advances.
_CLOSE_INTERVAL_S = 1.0


def parse_peer(peer: str) -> tuple[str, int | None]:
    """Return the IP address and the port in gRPC's name of a peer.

    They are `unix` and None on a Unix socket, and `unknown` and None if the name has another form.

    Args: peer: such as `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return "unix", None
    if kind not in ("ipv4", "ipv6"):
        return "unknown", None
    host, _, port = rest.rpartition(":")
    return host.strip("[]").partition("%")[0], int(port)


class ConnectionCloser:
    """Closes the connections of the peers that it was given within the last second, all at once.

    A peer has many calls, and each of them may give it to be closed.
    """

    def __init__(self) -> None:
        self._peers: set[str] = set()

    def close_soon(self, peer: str) -> None:
        """Close the connection of a peer within a second.

        Args: peer: as gRPC names it.
        """
        if not self._peers:
            asyncio.get_running_loop().call_later(_CLOSE_INTERVAL_S, self._close_all)
        self._peers.add(peer)

    def _close_all(self) -> None:
        peers, self._peers = self._peers, set()
        close_connections(peers)


def close_connections(peers: Iterable[str]) -> None:
    """Close the connections of peers, which ends all their calls.

    gRPC cannot end a call whose response is not read: the status would have to wait until it is.

    Args: peers: as gRPC names them.
    """
    addresses = {(parse_ip_address(host), port) for host, port in map(parse_peer, peers) if port is not None}
    if not addresses:
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
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                name = connection.getpeername()
                if (parse_ip_address(name[0].partition("%")[0]), name[1]) in addresses:
                    connection.shutdown(socket.SHUT_RDWR)
