"""Whether a client sends its body, or reads its response, fast enough."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# A body that is always just fast enough is not looked at more often.
_SHORTEST_LOOK_S = 0.1
_SECOND_LOOK_S = 0.01


@dataclass(slots=True)
class Pace:
    """The limits of the slowness of one body, of a request or a response, and what has been seen of it.

    Attributes:
        began: when it was first waited for, by `time.perf_counter`.
        pause_s: longest time without a byte.
        total_s: longest time for all of it.
        min_bytes_per_s: least mean rate from the beginning on; 0 for none.
        grace_s: after which that rate counts.
        unseen_bytes: so many may have passed without showing yet; the rate allows for them.
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
        """What is wrong with a body of which so many bytes have come, if anything is."""
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
        """How long there need be no other look at a body that was in order."""
        due = max(self._due(received), now + _SHORTEST_LOOK_S)
        return max(0.0, min(self.began + self.total_s, self._progressed + self.pause_s, due) - now)

    def _due(self, received: int) -> float:
        """When more than what has come should have."""
        if not self.min_bytes_per_s:
            return self.began + self.total_s
        return self.began + max(self.grace_s, (received + self.unseen_bytes) / self.min_bytes_per_s)


class PaceWatch:
    """Calls once when a body is too slow."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pace: Pace,
        passed: Callable[[], int],
        at_fault: Callable[[str], None],
    ) -> None:
        """Args:
        passed: how many bytes of it have come, or left.
        at_fault: is told what is wrong.
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
        # After a stall of the server's own, its timers come due before its sockets are looked at.
        self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look, self._at_fault)
