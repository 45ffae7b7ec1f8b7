"""Speed limits of clients that send a body or read a response."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Shortest time between two checks of a body that is only just fast enough.
_SHORTEST_LOOK_S = 0.1
_SECOND_LOOK_S = 0.01


@dataclass(slots=True)
class TransferProgress:
    """The speed limits of one body of a request or a response, and how much of it has been transferred.

    Attributes:
        began_at: when the wait for the body began, by `time.perf_counter`.
        max_pause_s: longest time without a byte.
        max_total_s: longest time for the complete body.
        min_bytes_per_s: minimum mean rate since the beginning; 0 for none.
        grace_s: time after which that rate applies.
        uncounted_bytes: bytes that may have been transferred without being counted yet; the rate allows
            for them.
    """

    began_at: float
    max_pause_s: float
    max_total_s: float
    min_bytes_per_s: float = 0.0
    grace_s: float = 0.0
    uncounted_bytes: int = 0
    _received_bytes: int = 0
    _last_progress: float = field(init=False)

    def __post_init__(self) -> None:
        self._last_progress = self.began_at

    def update_and_check(self, now: float, received: int) -> str | None:
        """Record that `received` bytes have been transferred; return a description of the limit that the body
        violates.

        Return None if the body is fast enough.
        """
        if received != self._received_bytes:
            self._received_bytes, self._last_progress = received, now
        if now >= self.began_at + self.max_total_s:
            return f"the body had not come after {self.max_total_s:g} s"
        if now >= self._last_progress + self.max_pause_s:
            return f"no more of the body came for {self.max_pause_s:g} s"
        if now >= self._compute_due_time(received):
            return f"the body came at less than {self.min_bytes_per_s:g} bytes a second"
        return None

    def compute_next_check_s(self, now: float, received: int) -> float:
        """Return the seconds until the next check of a body that is fast enough now."""
        due = max(self._compute_due_time(received), now + _SHORTEST_LOOK_S)
        return max(0.0, min(self.began_at + self.max_total_s, self._last_progress + self.max_pause_s, due) - now)

    def _compute_due_time(self, received: int) -> float:
        """Return the time by which more than `received` bytes must be transferred.

        It follows from the minimum rate.
        """
        if not self.min_bytes_per_s:
            return self.began_at + self.max_total_s
        return self.began_at + max(self.grace_s, (received + self.uncounted_bytes) / self.min_bytes_per_s)


class SlowTransferMonitor:
    """A timer that calls a function once if a body is transferred too slowly."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pace: TransferProgress,
        passed: Callable[[], int],
        at_fault: Callable[[str], None],
    ) -> None:
        """Args:
        passed: returns the number of bytes received or sent.
        at_fault: called with a description of the fault.
        """
        self._loop = loop
        self._progress = pace
        self._count_bytes = passed
        self._on_fault = at_fault
        self._schedule_check(time.perf_counter())

    def stop(self) -> None:
        self._timer.cancel()

    def _schedule_check(self, now: float) -> None:
        wait_s = self._progress.compute_next_check_s(now, self._count_bytes())
        self._timer = self._loop.call_later(wait_s, self._check_progress, self._schedule_second_check)

    def _check_progress(self, at_fault: Callable[[str], None]) -> None:
        """Call `at_fault` if the body is too slow, else schedule the next check.

        After the first fault, `at_fault` schedules a second check, since the server itself may have
        stalled.
        """
        now = time.perf_counter()
        fault = self._progress.update_and_check(now, self._count_bytes())
        if fault is None:
            self._schedule_check(now)
        else:
            at_fault(fault)

    def _schedule_second_check(self, fault: str) -> None:
        # After a stall of the server itself, its timers run before its sockets are read: check once more.
        self._timer = self._loop.call_later(_SECOND_LOOK_S, self._check_progress, self._on_fault)
