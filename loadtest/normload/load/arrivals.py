"""When the next request is sent, and which.

A schedule is the same whatever the server, and however many processes share it: each of them walks the whole of it
and sends every n-th request.  Where all connections are busy when one comes due it is late, and its latency counts
from when it was due.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from normload.load.scenario import Phase

_CHUNK = 4096


class Slot(NamedTuple):
    """A request that is due.

    Attributes:
        phase: its place in the segment.
        due: by the clock, in seconds.
        request: its place in the pool.
    """

    phase: int
    due: float
    request: int


class Arrivals(Protocol):
    """A source of scheduled requests."""

    #: By the clock; what is due but not sent by then is not sent any more.
    cutoff: float

    def next(self, now: float) -> Slot | float | None:
        """A request that is due now; else the seconds until one is, or None when all are sent, or at a stop."""

    def stop(self) -> None:
        """Schedule no more requests."""


class OpenLoop:
    """Requests of consecutive phases at their rates, whatever becomes of those before."""

    def __init__(
        self,
        phases: Sequence[Phase],
        start: float,
        grace_s: float,
        draws: "Draws",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Args:
        phases: one after another, their rates in requests a second.
        start: of the first one, by the clock.
        grace_s: how long after the last one's end a late request is still sent.
        draws: when and which.
        share: send the requests whose number leaves the first as remainder after division by the second.
        """
        self.cutoff = start + sum(phase.duration_s for phase in phases) + grace_s
        self._slots: Iterator[Slot] = itertools.islice(draws.schedule(phases, start), share[0], None, share[1])
        self._following = next(self._slots, None)

    def next(self, now: float) -> Slot | float | None:
        """As `Arrivals.next`."""
        slot = self._following
        if slot is None:
            return None
        if slot.due > now:
            return slot.due - now
        self._following = next(self._slots, None)
        return slot

    def stop(self) -> None:
        """Schedule no more requests."""
        self._following, self._slots = None, iter(())


class ClosedLoop:
    """A request as soon as a connection has its response, until the phase ends.

    The rate follows from the server: a slow one gets fewer requests.
    """

    def __init__(
        self,
        phase: Phase,
        start: float,
        draws: "Draws",
    ) -> None:
        """Args: as `OpenLoop`."""
        self.cutoff = math.inf
        self._start, self._end = start, start + phase.duration_s
        self._requests = draws.requests()

    def next(self, now: float) -> Slot | float | None:
        """As `Arrivals.next`."""
        if now >= self._end:
            return None
        return self._start - now if now < self._start else Slot(0, now, next(self._requests))

    def stop(self) -> None:
        """Schedule no more requests."""
        self._end = -math.inf


class Draws:
    """The random choices: the times between requests, and the requests themselves."""

    def __init__(self, seed: Sequence[int], shares: Sequence[float]) -> None:
        """Args:
        seed: of everything.
        shares: how often each request of the pool is drawn next to the others.
        """
        self._seed = seed
        self._shares = np.asarray(shares, np.float64) / sum(shares)

    def requests(self) -> Iterator[int]:
        """Indices into the pool, without end."""
        numbers = np.random.default_rng([*self._seed, 0])
        while True:
            yield from numbers.choice(len(self._shares), _CHUNK, p=self._shares).tolist()

    def schedule(self, phases: Sequence[Phase], start: float) -> Iterator[Slot]:
        """Every request of all phases."""
        requests = self.requests()
        for place, phase in enumerate(phases):
            end = start + phase.duration_s
            for due in self._times(place, phase, start):
                if due >= end:
                    break
                yield Slot(place, due, next(requests))
            start = end

    def _times(self, place: int, phase: Phase, start: float) -> Iterator[float]:
        if phase.arrivals == "constant":
            for number in itertools.count():
                yield start + number / phase.rate
        numbers, now = np.random.default_rng([*self._seed, 1, place]), start
        while True:
            for due in (now + np.cumsum(numbers.exponential(1 / phase.rate, _CHUNK))).tolist():
                yield due
                now = due
