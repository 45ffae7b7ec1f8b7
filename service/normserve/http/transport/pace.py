"""Whether a client sends its body, or reads its response, fast enough."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Shortest time between two checks of a body that is only just fast enough.
_SHORTEST_LOOK_S = 0.1
_SECOND_LOOK_S = 0.01


@dataclass(slots=True)
class TransferProgress:
    """The speed limits of one body, of a request or a response, and its progress so far.

    Attributes:
        began: when the wait for it began, by `time.perf_counter`.
        pause_s: longest time without a byte.
        total_s: longest time for the whole body.
        min_bytes_per_s: minimum mean rate since the beginning; 0 for none.
        grace_s: time after which that rate applies.
        unseen_bytes: bytes that may have been transferred without being counted yet; the rate allows for them.
    """

    began: float
    pause_s: float
    total_s: float
    min_bytes_per_s: float = 0.0
    grace_s: float = 0.0
    unseen_bytes: int = 0
    _received: int = 0
    _progressed: float = field(init=False)

    def __post_init__(self) -> None:
        self._progressed = self.began

    def fault(self, now: float, received: int) -> str | None:
        """The fault of a body of which `received` bytes have arrived; None if it is fast enough."""
        if received != self._received:
            self._received, self._progressed = received, now
        if now >= self.began + self.total_s:
            return f"the body had not come after {self.total_s:g} s"
        if now >= self._progressed + self.pause_s:
            return f"no more of the body came for {self.pause_s:g} s"
        if now >= self._due(received):
            return f"the body came at less than {self.min_bytes_per_s:g} bytes a second"
        return None

    def next_look_s(self, now: float, received: int) -> float:
        """The time until the next check of a body that is fast enough now."""
        due = max(self._due(received), now + _SHORTEST_LOOK_S)
        return max(0.0, min(self.began + self.total_s, self._progressed + self.pause_s, due) - now)

    def _due(self, received: int) -> float:
        """The time at which more than `received` bytes must have arrived."""
        if not self.min_bytes_per_s:
            return self.began + self.total_s
        return self.began + max(self.grace_s, (received + self.unseen_bytes) / self.min_bytes_per_s)


class SlowTransferMonitor:
    """Calls a function once when a body is too slow."""

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
        self._pace = pace
        self._passed = passed
        self._at_fault = at_fault
        self._arm(time.perf_counter())

    def stop(self) -> None:
        self._timer.cancel()

    def _arm(self, now: float) -> None:
        wait_s = self._pace.next_look_s(now, self._passed())
        self._timer = self._loop.call_later(wait_s, self._look, self._look_again)

    def _look(self, at_fault: Callable[[str], None]) -> None:
        now = time.perf_counter()
        fault = self._pace.fault(now, self._passed())
        if fault is None:
            self._arm(now)
        else:
            at_fault(fault)

    def _look_again(self, fault: str) -> None:
        # After a stall of the server itself, its timers run before its sockets are read: check once more.
        self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look, self._at_fault)
