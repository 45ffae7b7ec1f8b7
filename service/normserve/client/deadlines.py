"""The deadline of a call, for all its waits: for a connection, sending, the response, and the next attempt."""

import asyncio
import threading
import time
from numbers import Real

from normserve.client.argument_checks import check_type
from normserve.client.errors import RequestTimeoutError


def check_timeout(timeout_s: float | None) -> None:
    """Refuse what is no time to wait.

    Raises:
        TypeError, ValueError: it is neither None nor a number of seconds above 0 that the system can wait.
    """
    check_type("timeout_s", timeout_s, (Real, None), "a number or None")
    if timeout_s is not None and not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s must be above 0 and finite, or None, got {timeout_s}")


class Deadline:
    """The end of a call's time, which begins when this is made."""

    __slots__ = ("_ends_at", "_timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        """Args: timeout_s: all the time that there is; None is for ever."""
        self._timeout_s = timeout_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    def get_remaining_s(self) -> float | None:
        """Seconds that are left, 0 or fewer when the time is over; None is for ever."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def is_over(self, after_s: float = 0.0) -> bool:
        """Whether nothing is left once `after_s` more have passed."""
        left_s = self.get_remaining_s()
        return left_s is not None and left_s <= after_s

    def make_error(self) -> RequestTimeoutError:
        """What to raise when it is over."""
        return RequestTimeoutError(f"there was no complete answer within {self._timeout_s or 0:g} s")

    def check(self) -> None:
        """Raises: RequestTimeoutError: it is over."""
        if self._ends_at is not None and self._ends_at <= time.monotonic():
            raise self.make_error()

    def acquire_lock(self, lock: threading.Lock) -> None:
        """Acquire a lock, which is the caller's to release.

        Raises: RequestTimeoutError: it is over before.
        """
        if lock.acquire(blocking=False):
            return
        left_s = self.get_remaining_s()
        if not lock.acquire(timeout=-1 if left_s is None else max(0.0, left_s)):
            raise self.make_error()

    def make_asyncio_timeout(self) -> asyncio.Timeout:
        """What ends the waiting of a task when it is over."""
        return asyncio.timeout(self.get_remaining_s())

    def make_httpx_timeouts(self) -> dict[str, "RemainingSeconds | None"]:
        """The timeouts of a request as httpx's transports take them."""
        left = None if self._ends_at is None else RemainingSeconds(self)
        return dict.fromkeys(("connect", "read", "write", "pool"), left)


class RemainingSeconds(float):
    """Seconds that were left of a deadline when this was made; for a further wait, ask the deadline itself.

    httpx hands one number to every wait of a request.  To transports of any kind this is that number.
    """

    deadline: Deadline

    def __new__(cls, deadline: Deadline) -> "RemainingSeconds":
        """Args: deadline: one that comes."""
        made = super().__new__(cls, max(0.0, deadline.get_remaining_s() or 0.0))
        made.deadline = deadline
        return made
