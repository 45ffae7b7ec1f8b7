"""Permits: how many requests, and how many bytes of bodies, may be inside the server at once."""

import math
import time
from collections.abc import Callable

from normserve.errors import OverloadedError

# What was given back longer ago hardly counts for the rate.
_MEMORY_S = 10.0
_LONGEST_WAIT_S = 60.0


class Rate:
    """How much a second leaves, of late: a mean that forgets exponentially."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = self._last = clock()
        self._amount = 0.0

    def note(self, amount: float) -> None:
        """So much has left now."""
        now = self._clock()
        self._amount = self._amount * math.exp((self._last - now) / _MEMORY_S) + amount
        self._last = now

    def seconds_for(self, amount: float) -> float:
        """How long so much will take to leave; 0 while nothing is known."""
        now = self._clock()
        remembered = self._amount * math.exp((self._last - now) / _MEMORY_S)
        # Since the start, less than the whole memory has been filled.
        span = _MEMORY_S * (1 - math.exp((self._since - now) / _MEMORY_S))
        return amount * span / remembered if remembered else 0.0


class Limits:
    """A budget of requests and bytes, taken by try-acquire: nobody ever waits for a permit.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0
        self._requests_out = Rate(clock)
        self._bytes_out = Rate(clock)

    def acquire(self, nbytes: int) -> "Permit":
        """Admit one request that brings `nbytes`.

        Raises:
            OverloadedError: the budget of requests or of bytes is spent; it says when what is inside now will have
                left, at the rate of late.
        """
        if self.requests >= self._max_requests:
            raise OverloadedError(
                f"{self.requests} requests are in flight, no more than that are admitted",
                _wait(self._requests_out.seconds_for(self.requests)),
            )
        permit = Permit(self)
        self.reserve(nbytes)
        permit.nbytes = nbytes
        self.requests += 1
        return permit

    def reserve(self, nbytes: int) -> None:
        """Take bytes out of the budget.

        Raises:
            OverloadedError: they are not there.
        """
        if self.bytes + nbytes > self._max_bytes:
            raise OverloadedError(
                f"{nbytes} more bytes do not fit beside {self.bytes} in flight of {self._max_bytes} admitted",
                _wait(self._bytes_out.seconds_for(self.bytes)),
            )
        self.bytes += nbytes

    def give_back(self, permit: "Permit") -> None:
        """Called once by each permit."""
        self.requests -= 1
        self.bytes -= permit.nbytes
        self._requests_out.note(1)
        self._bytes_out.note(permit.nbytes)


def _wait(seconds: float) -> float:
    return min(max(1.0, seconds), _LONGEST_WAIT_S)


class Permit:
    """The right of one request to be inside; release it when the last byte is out or the client is gone."""

    def __init__(self, limits: Limits) -> None:
        self._limits: Limits | None = limits
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Ask for more bytes, for a body whose length was not announced.

        Raises:
            OverloadedError: the budget is spent; what the permit already holds stays held.
        """
        if self._limits is not None:
            self._limits.reserve(nbytes)
            self.nbytes += nbytes

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.give_back(self)
