"""When the next request is sent."""

import time
from collections.abc import Callable


class ClosedLoop:
    """As soon as a connection has its answer, until so many requests are sent or so much time has passed.

    The rate follows from the server: a slow one is asked less.
    """

    def __init__(
        self,
        *,
        requests: int | None = None,
        duration_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args:
        requests: how many in all; None does not limit them.
        duration_s: counted from the first request; None does not limit it.
        clock: seconds, rising.
        """
        self._left = requests
        self._duration_s = duration_s
        self._clock = clock
        self._end: float | None = None

    def stop(self) -> None:
        """Send nothing more."""
        self._left = 0

    async def next(self) -> float | None:
        """Wait until a connection may send, and return when it was meant to; None when all is sent."""
        now = self._clock()
        if self._end is None and self._duration_s is not None:
            self._end = now + self._duration_s
        if self._end is not None and now >= self._end:
            return None
        if self._left is not None:
            if self._left == 0:
                return None
            self._left -= 1
        return now
