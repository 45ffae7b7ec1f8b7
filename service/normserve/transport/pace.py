"""Whether a body comes fast enough."""

from dataclasses import dataclass, field

# A body that is always just fast enough is not looked at more often.
_SHORTEST_LOOK_S = 0.1


@dataclass(slots=True)
class Pace:
    """The limits of one body's slowness, and what has been seen of it.

    Attributes:
        began: when it was first waited for.
        pause_s: longest time without a byte.
        total_s: longest time for all of it.
        min_bytes_per_s: least mean rate from the beginning on; 0 for none.
        grace_s: after which that rate counts.
    """

    began: float
    pause_s: float
    total_s: float
    min_bytes_per_s: float = 0.0
    grace_s: float = 0.0
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
        return self.began + max(self.grace_s, received / self.min_bytes_per_s)
