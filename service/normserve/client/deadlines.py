"""The deadline of a call, over all its waits: for a connection, sending, the response, and the next attempt."""

import asyncio
import threading
import time
from numbers import Real

from normserve.client.argument_checks import check_type
from normserve.client.errors import RequestTimeoutError


def check_timeout(timeout_s: float | None) -> None:
    """Require None or a number of seconds above 0, at most the longest time that the operating system can wait.

    Raises:
        TypeError, ValueError: the timeout is no number, or not above 0, infinite or too large.
    """
    check_type("timeout_s", timeout_s, (Real, None), "a number or None")
    if timeout_s is not None and not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s must be above 0 and finite, or None, got {timeout_s}")


class Deadline:
    """The deadline of a call, counted from the construction of this object."""

    __slots__ = ("_ends_at", "_timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        """Args: timeout_s: seconds from now to the deadline; None is no deadline."""
        self._timeout_s = timeout_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    def get_remaining_s(self) -> float | None:
        """Return the seconds that are left, 0 or fewer after the deadline; None without a deadline."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def is_over(self, after_s: float = 0.0) -> bool:
        """Return whether the deadline will have passed in `after_s` seconds."""
        remaining_s = self.get_remaining_s()
        return remaining_s is not None and remaining_s <= after_s

    def make_error(self) -> RequestTimeoutError:
        """Make the error of a passed deadline."""
        return RequestTimeoutError(f"there was no complete answer within {self._timeout_s or 0:g} s")

    def check(self) -> None:
        """Raise RequestTimeoutError if the deadline has passed."""
        if self._ends_at is not None and self._ends_at <= time.monotonic():
            raise self.make_error()

    def acquire_lock(self, lock: threading.Lock) -> None:
        """Acquire a lock, waiting until the deadline at most; the caller must release the lock.

        Raises: RequestTimeoutError: the deadline passed before.
        """
        if lock.acquire(blocking=False):
            return
        remaining_s = self.get_remaining_s()
        if not lock.acquire(timeout=-1 if remaining_s is None else max(0.0, remaining_s)):
            raise self.make_error()

    def make_asyncio_timeout(self) -> asyncio.Timeout:
        """Make an asyncio timeout that ends a task's wait at the deadline."""
        return asyncio.timeout(self.get_remaining_s())

    def make_httpx_timeouts(self) -> dict[str, "RemainingSeconds | None"]:
        """Make the timeouts of a request in the form of httpx's transports."""
        remaining = None if self._ends_at is None else RemainingSeconds(self)
        return dict.fromkeys(("connect", "read", "write", "pool"), remaining)


class RemainingSeconds(float):
    """A deadline in the form of a timeout for httpx: the seconds that remained when this object was made.

    httpx passes one number to every wait of a request.  This package's network backend computes the seconds
    that remain at a later wait from `deadline`; any other transport uses the object as a plain number.
    """

    deadline: Deadline

    def __new__(cls, deadline: Deadline) -> "RemainingSeconds":
        """Args: deadline: a deadline with a time limit."""
        made = super().__new__(cls, max(0.0, deadline.get_remaining_s() or 0.0))
        made.deadline = deadline
        return made
