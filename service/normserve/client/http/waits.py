"""How long a wait of an exchange may take."""

from collections.abc import Mapping
from typing import Protocol

import httpx

from normserve.client.deadlines import Deadline
from normserve.client.http.steps import WRITE


class Waits(Protocol):
    """Says how long to wait."""

    def left_s(self, kind: str) -> float | None:
        """Seconds, 0 or fewer when there is no time; None is for ever.

        Args: kind: of wait, as httpx names its timeouts: "connect", "read", "write" or "pool".
        """


class WholeCall:
    """One deadline for all waits together."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def left_s(self, kind: str) -> float | None:
        """As `Waits.left_s`."""
        return self._deadline.left_s()


class EachWait:
    """httpx's timeouts, which begin anew with each wait."""

    def __init__(self, timeouts: Mapping[str, float | None]) -> None:
        self._timeouts = timeouts

    def left_s(self, kind: str) -> float | None:
        """As `Waits.left_s`."""
        return self._timeouts.get(kind)


_ERRORS = {
    "connect": httpx.ConnectTimeout,
    "read": httpx.ReadTimeout,
    "write": httpx.WriteTimeout,
    "pool": httpx.PoolTimeout,
}


def late(kind: str) -> httpx.TimeoutException:
    """What to raise when a wait took too long."""
    return _ERRORS[kind]("there was no more time")


def kind_of(events: int) -> str:
    """Which of an exchange's waits this is."""
    return "write" if events & WRITE else "read"
