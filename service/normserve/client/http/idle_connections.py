"""The idle connections of a pool."""

import collections
import time

from normserve.client.http.connection import ClientHttpConnection


class IdleConnectionStack:
    """A stack of idle connections for later calls; threads may share it without a lock."""

    def __init__(self, most: int, keep_s: float) -> None:
        """Args:
        most: connections to keep.
        keep_s: seconds for which an idle connection is kept.
        """
        self._max_connections = most
        self._idle_timeout_s = keep_s
        self._idle: collections.deque[ClientHttpConnection] = collections.deque()

    def pop(self) -> ClientHttpConnection | None:
        """Remove and return the most recently used connection that is still usable; return None if there is none.

        Expired connections, and those that the server closed, are closed and removed on the way.
        """
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - connection.idle_since <= self._idle_timeout_s and connection.is_quiet():
                return connection
            connection.close()

    def push(self, connection: ClientHttpConnection) -> None:
        """Add a connection; close the oldest connections that have expired or exceed the limit."""
        self._idle.append(connection)
        while self._idle:
            try:
                oldest = self._idle.popleft()
            except IndexError:
                return
            if (
                len(self._idle) < self._max_connections
                and time.monotonic() - oldest.idle_since <= self._idle_timeout_s
            ):
                self._idle.appendleft(oldest)
                return
            oldest.close()

    def close_all(self) -> None:
        """Close all idle connections."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
