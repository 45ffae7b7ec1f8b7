"""Idle connections, which are closed when a new connection exceeds a limit."""

import time
from typing import Protocol

# A connection that is used again and again is not idle between two requests.
_LEAST_IDLE_S = 1.0


class IdleConnection(Protocol):
    """A connection that waits for its next request.

    Attributes:
        address: the client's address, in the form that the limits of connections use.
    """

    address: str

    def shutdown(self) -> None:
        """Close the connection."""


class IdleConnectionQueue:
    """All idle connections of a process, in the order in which they became idle."""

    def __init__(self) -> None:
        self._idle_since: dict[IdleConnection, float] = {}

    def add_connection(self, connection: IdleConnection) -> None:
        """Add a connection that begins to wait for a request."""
        self._idle_since[connection] = time.monotonic()

    def discard_connection(self, connection: IdleConnection) -> None:
        """Remove a connection, if it is in the queue."""
        self._idle_since.pop(connection, None)

    def try_close_oldest(self, address: str | None) -> bool:
        """Close the connection that has been idle for longest; return True if one was closed.

        Return False if no connection has been idle for at least a second.

        Args: address: the address of its client; None for any client.
        """
        latest = time.monotonic() - _LEAST_IDLE_S
        for connection, since in self._idle_since.items():
            if since > latest:
                return False
            if address is None or connection.address == address:
                del self._idle_since[connection]
                connection.shutdown()
                return True
        return False
