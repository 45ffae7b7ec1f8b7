"""Connections that wait for a request give way to new ones."""

import time
from typing import Protocol

# A connection that is used again and again is not idle between two requests.
_LEAST_IDLE_S = 1.0


class IdleConnection(Protocol):
    """A connection without a request.

    Attributes:
        address: of its client, as the limits of connections have it.
    """

    address: str

    def shutdown(self) -> None:
        """Close it."""


class IdleConnectionQueue:
    """All idle connections of a process, in the order in which they became idle."""

    def __init__(self) -> None:
        self._idle_since: dict[IdleConnection, float] = {}

    def add_connection(self, connection: IdleConnection) -> None:
        """Begin the wait for a request."""
        self._idle_since[connection] = time.monotonic()

    def discard_connection(self, connection: IdleConnection) -> None:
        """End the wait, if the connection is idle."""
        self._idle_since.pop(connection, None)

    def close_oldest(self, address: str | None) -> bool:
        """Close the connection that has been idle for longest; return whether there was one.

        Args: address: of its client; None for any.
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
