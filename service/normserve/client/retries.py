"""The policy for repeated attempts, and the pauses before them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

from normserve.client.argument_checks import check_count, check_pause_s, check_type
from normserve.client.deadlines import Deadline
from normserve.client.errors import ClientError, ConnectionFailedError

# Beyond so many doublings of any pause a float overflows.
_MOST_DOUBLINGS = 60

# Between attempts to connect again, so that a server that is back is noticed soon.
_LONGEST_RECONNECT_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The limits and pauses for repeating a request that may succeed later.

    Pauses double from `first_pause_s` and are shortened at random by up to half, so that clients that failed
    together do not retry together.  A Retry-After is the shortest wait; a Retry-After above `longest_pause_s`, or
    a pause that exceeds the client's timeout, ends the attempts at once.

    Attributes:
        tries: attempts in all, default 5; 1 never repeats.  Requests to a server that is still starting (503
            `not_ready`) are repeated until the call's timeout, about as often as its Retry-After says.
        first_pause_s: seconds before the second attempt; default 0.1.
        longest_pause_s: the most seconds before any attempt; default 30.0.
        reconnect_s: seconds for which a call keeps connecting again, counted from its first failed connection,
            whatever `tries` is (except 1), with pauses of at most a second; within the call's timeout.  A call
            outlasts a restart that takes less.  None (default) counts failed connections as attempts.

    Raises:
        TypeError, ValueError: a value is not a valid number of attempts or of seconds.

    Examples:
        >>> from normserve.client import Client, RetryPolicy
        >>> client = Client("http://127.0.0.1:8000", retries=RetryPolicy(tries=3, reconnect_s=30.0))
    """

    tries: int = 5
    first_pause_s: float = 0.1
    longest_pause_s: float = 30.0
    reconnect_s: float | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if a value is no valid number of attempts or of seconds."""
        check_count("tries", self.tries, 1)
        check_pause_s("first_pause_s", self.first_pause_s)
        check_pause_s("longest_pause_s", self.longest_pause_s)
        if self.reconnect_s is not None:
            check_pause_s("reconnect_s", self.reconnect_s)

    @classmethod
    def of(cls, retries: "RetryPolicy | int | None") -> "RetryPolicy":
        """Convert a client's `retries` argument to a policy.

        Args:
            retries: a policy, the number of repetitions (at least 0), or None for the default policy.

        Returns:
            RetryPolicy: the argument itself if it is a policy.

        Raises:
            TypeError, ValueError: it is neither a policy, nor a number of at least 0, nor None.
        """
        if isinstance(retries, RetryPolicy):
            return retries
        check_type("retries", retries, (Integral, None), "a RetryPolicy, an int or None")
        if retries is None:
            return cls()
        check_count("retries", retries, 0)
        return cls(tries=retries + 1)


class RetrySchedule:
    """The state of one call's retries.  It counts the failed attempts, and computes the pause before the next
    attempt from the policy.
    """

    def __init__(
        self, policy: RetryPolicy, deadline: Deadline, jitter: Callable[[], float] = random.random
    ) -> None:
        """Args:
        policy: the limits and pauses.
        deadline: of the call; no attempt starts after it.
        jitter: gives numbers in [0, 1).
        """
        self._policy = policy
        self._deadline = deadline
        self._jitter = jitter
        self._attempt_count = 0
        self._reconnect_count = 0
        self._reconnect_deadline: Deadline | None = None

    def take_next_pause_s(self, failure: ClientError) -> float | None:
        """Count a failed attempt; return the seconds to wait before the next one, or None if there is none."""
        if not failure.retryable:
            return None
        if isinstance(failure, ConnectionFailedError) and self._policy.reconnect_s is not None:
            return self._take_next_reconnect_pause_s(self._policy.reconnect_s)
        is_starting = self._is_starting(failure)
        if is_starting and failure.retry_after_s is not None:
            pause_s = self._compute_backoff_pause_s(failure.retry_after_s, doublings=0)
        else:
            self._attempt_count += 1
            if self._attempt_count >= self._policy.tries and not is_starting:
                return None
            pause_s = self._compute_backoff_pause_s(failure.retry_after_s, doublings=self._attempt_count - 1)
        return None if pause_s is None or self._deadline.is_over(pause_s) else pause_s

    def _take_next_reconnect_pause_s(self, reconnect_s: float) -> float | None:
        """Return the seconds before the next attempt to connect; None if that would be too late.

        Attempts end `reconnect_s` seconds after the first failed connection, and at the call's deadline.
        """
        if self._policy.tries <= 1:
            return None
        self._reconnect_deadline = self._reconnect_deadline or Deadline(reconnect_s)
        longest = min(self._policy.longest_pause_s, _LONGEST_RECONNECT_PAUSE_S)
        backoff = self._compute_backoff_s(self._reconnect_count, longest)
        self._reconnect_count += 1
        pause_s = backoff / 2 * (1 + self._jitter())
        return None if self._reconnect_deadline.is_over(pause_s) or self._deadline.is_over(pause_s) else pause_s

    def _is_starting(self, failure: ClientError) -> bool:
        """Return whether the server is still starting, for which attempts go on until the call's timeout."""
        return self._policy.tries > 1 and getattr(failure, "code", "") == "not_ready"

    def _compute_backoff_pause_s(self, retry_after_s: float | None, *, doublings: int) -> float | None:
        """Return a pause in seconds that grows exponentially and has jitter.  It is at least as long as the
        server's Retry-After.

        None if the Retry-After is longer than the policy's longest pause.
        """
        longest = self._policy.longest_pause_s
        backoff = self._compute_backoff_s(doublings, longest)
        jitter = backoff / 2 * self._jitter()
        if retry_after_s is None:
            return backoff / 2 + jitter
        if retry_after_s > longest:
            return None
        return min(retry_after_s + jitter, longest)

    def _compute_backoff_s(self, doublings: int, longest: float) -> float:
        return min(self._policy.first_pause_s * 2.0 ** min(doublings, _MOST_DOUBLINGS), longest)
