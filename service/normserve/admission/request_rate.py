"""The rate of a key's requests."""

import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket: so many requests a second in the long run, those of one second at once.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: per_second: above 0; below 1, requests come one at a time."""
        self.tokens_per_s = per_second
        self._clock = clock
        self._capacity = max(1.0, per_second)
        self._tokens = self._capacity
        self._refilled_at = clock()

    def refill_and_get_wait_s(self) -> float:
        """Seconds until another request may come; 0 if it may come now."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._refilled_at) * self.tokens_per_s)
        self._refilled_at = now
        return max(0.0, (1 - self._tokens) / self.tokens_per_s)

    def take_token(self) -> None:
        """A request has come; `refill_and_get_wait_s` said that it may."""
        self._tokens -= 1
