"""Idle connections."""

import collections
import time

from normserve.client.http.connection import ClientHttpConnection


class IdleConnectionStack:
    """Keeps connections for the next call; threads may share it, since appending and popping take no lock."""

    def __init__(self, most: int, keep_s: float) -> None:
        """Args:
        most: kept at once.
        keep_s: how long one is kept.
        """
        self._max_connections = most
        self._idle_timeout_s = keep_s
        self._idle: collections.deque[ClientHttpConnection] = collections.deque()

    def pop(self) -> ClientHttpConnection | None:
        """Return the connection that was used last, if one is still open."""
        while True:
            try:
                kept = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - kept.idle_since <= self._idle_timeout_s and kept.is_quiet():
                return kept
            kept.close()

    def push(self, connection: ClientHttpConnection) -> None:
        """Keep one more; those idle for long, and those beyond the limit, are closed."""
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
        """Close all."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
