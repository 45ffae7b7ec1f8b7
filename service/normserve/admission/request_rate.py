"""The rate of a key's requests."""

import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket for `per_second` requests a second, with bursts of as many as one second allows.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: per_second: above 0; below 1, bursts are of one request."""
        self.tokens_per_s = per_second
        self._clock = clock
        self._capacity = max(1.0, per_second)
        self._tokens = self._capacity
        self._refilled_at = clock()

    def refill_and_get_wait_s(self) -> float:
        """Refill the bucket; return the seconds until it has a token, 0 if it has one now."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._refilled_at) * self.tokens_per_s)
        self._refilled_at = now
        return max(0.0, (1 - self._tokens) / self.tokens_per_s)

    def take_token(self) -> None:
        """Take a token for a request, after `refill_and_get_wait_s` has returned 0."""
        self._tokens -= 1
