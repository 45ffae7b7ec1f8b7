"""When the next request is sent, and which.

A schedule is the same whatever the server, and however many processes share it: each of them walks the whole of it
and sends every n-th request.  Threads that are free wait for the next place in it together; where all are busy when
one comes due it is late, and its latency counts from when it was due.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
    """Says when to send."""

    #: By the clock; what is due but not sent by then is not sent any more.
    cutoff: float

    def next(self) -> Slot | None:
        """Wait until a request is due and return it; None when all are sent, or at a stop."""

    def stop(self) -> None:
        """Let nothing more be due."""


class OpenLoop:
    """Requests of consecutive phases at their rates, whatever becomes of those before."""

    def __init__(
        self,
        phases: Sequence[Phase],
        start: float,
        grace_s: float,
        draws: "Draws",
        share: tuple[int, int] = (0, 1),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args:
        phases: one after another, their rates in requests a second.
        start: of the first one, by the clock.
        grace_s: how long after the last one's end a late request is still sent.
        draws: when and which.
        share: send the requests whose number leaves the first as remainder after division by the second.
        clock: seconds, rising.
        """
        self.cutoff = start + sum(phase.duration_s for phase in phases) + grace_s
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._slots = itertools.islice(draws.schedule(phases, start), share[0], None, share[1])

    def next(self) -> Slot | None:
        """Wait until a request is due and return it; None when all are sent, or at a stop."""
        with self._lock:
            slot = next(self._slots, None)
        if slot is None or self._stop.is_set():
            return None
        delay_s = slot.due - self._clock()
        return None if delay_s > 0 and self._stop.wait(delay_s) else slot

    def stop(self) -> None:
        """Let nothing more be due."""
        self._stop.set()


class ClosedLoop:
    """As soon as a connection has its answer, until the phase is over.

    The rate follows from the server: a slow one is asked less.
    """

    def __init__(
        self,
        phase: Phase,
        start: float,
        draws: "Draws",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args: as `OpenLoop`."""
        self.cutoff = math.inf
        self._start, self._end = start, start + phase.duration_s
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._requests = draws.requests()

    def next(self) -> Slot | None:
        """Return a request that is due now; None when the phase is over, or at a stop."""
        early_s = self._start - self._clock()
        if early_s > 0:
            self._stop.wait(early_s)
        now = self._clock()
        if now >= self._end or self._stop.is_set():
            return None
        with self._lock:
            return Slot(0, now, next(self._requests))

    def stop(self) -> None:
        """Let nothing more be due."""
        self._stop.set()


class Draws:
    """What is random: the times between requests, and which one it is."""

    def __init__(self, seed: Sequence[int], shares: Sequence[float]) -> None:
        """Args:
        seed: of everything.
        shares: how often each request of the pool is drawn next to the others.
        """
        self._seed = seed
        self._shares = np.asarray(shares, np.float64) / sum(shares)

    def requests(self) -> Iterator[int]:
        """Places in the pool, for ever."""
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
