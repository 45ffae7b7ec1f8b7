"""The schedule: when each request is sent, and which.

A schedule does not depend on the server or on the number of processes that share it: each of n processes computes
all of it and sends every n-th request.  A request is late if all connections are busy when it is due; its latency
counts from its scheduled time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from normload.load.scenarios import LoadPhase

_CHUNK = 4096


class ScheduledRequest(NamedTuple):
    """One request of a schedule: when it is due, and which request of the pool it is.

    Attributes:
        phase_index: index of its phase in the segment.
        due_at: its scheduled time by the clock, in seconds.
        request_index: its index in the pool.
    """

    phase_index: int
    due_at: float
    request_index: int


class RequestSchedule(Protocol):
    """A schedule from which a client process takes each request when it is due."""

    #: By the clock; requests that are due but not sent by then are not sent any more.
    cutoff: float

    def take_due(self, now: float) -> ScheduledRequest | float | None:
        """Take a request that is due now; else return the seconds until the next one, or None after the last or a
        stop.
        """

    def stop(self) -> None:
        """Schedule no more requests."""


class OpenLoopSchedule:
    """A schedule at the phases' rates, whether or not earlier requests have been answered."""

    def __init__(
        self,
        phases: Sequence[LoadPhase],
        start: float,
        grace_s: float,
        draws: "ArrivalGenerator",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Args:
        phases: one after another, with their rates in requests per second.
        start: of the first one, by the clock.
        grace_s: how long after the last phase's end a late request is still sent.
        draws: the random times and requests.
        share: (r, n): send the requests whose number leaves the remainder r after division by n.
        """
        self.cutoff = start + sum(phase.duration_s for phase in phases) + grace_s
        self._slots: Iterator[ScheduledRequest] = itertools.islice(
            draws.iterate_schedule(phases, start), share[0], None, share[1]
        )
        self._next_request = next(self._slots, None)

    def take_due(self, now: float) -> ScheduledRequest | float | None:
        """Take the next request if it is due; else return the seconds until then, or None if none remains."""
        slot = self._next_request
        if slot is None:
            return None
        if slot.due_at > now:
            return slot.due_at - now
        self._next_request = next(self._slots, None)
        return slot

    def stop(self) -> None:
        """Schedule no more requests."""
        self._next_request, self._slots = None, iter(())


class ClosedLoopSchedule:
    """A schedule in which every free connection sends its next request at once, until the phase ends.

    The rate depends on the server: a slow one gets fewer requests.
    """

    def __init__(
        self,
        phase: LoadPhase,
        start: float,
        draws: "ArrivalGenerator",
    ) -> None:
        """Args: as of `OpenLoopSchedule`."""
        self.cutoff = math.inf
        self._start, self._end = start, start + phase.duration_s
        self._requests = draws.draw_request_numbers()

    def take_due(self, now: float) -> ScheduledRequest | float | None:
        """Take the next request, which is due now.  Before the phase's start, return the seconds until then; after
        its end, return None.
        """
        if now >= self._end:
            return None
        return self._start - now if now < self._start else ScheduledRequest(0, now, next(self._requests))

    def stop(self) -> None:
        """Schedule no more requests."""
        self._end = -math.inf


class ArrivalGenerator:
    """A seeded generator of the order of the requests, and of the times when they are due."""

    def __init__(self, seed: Sequence[int], shares: Sequence[float]) -> None:
        """Args:
        seed: of all random choices.
        shares: relative frequency of each request of the pool.
        """
        self._seed = seed
        self._shares = np.asarray(shares, np.float64) / sum(shares)

    def draw_request_numbers(self) -> Iterator[int]:
        """Yield random indices into the request pool, endlessly.  Each request is drawn with its relative
        frequency.
        """
        numbers = np.random.default_rng([*self._seed, 0])
        while True:
            yield from numbers.choice(len(self._shares), _CHUNK, p=self._shares).tolist()

    def iterate_schedule(self, phases: Sequence[LoadPhase], start: float) -> Iterator[ScheduledRequest]:
        """Yield the requests of consecutive phases in order of time, for all client processes together."""
        requests = self.draw_request_numbers()
        for place, phase in enumerate(phases):
            end = start + phase.duration_s
            for due in self._iterate_times(place, phase, start):
                if due >= end:
                    break
                yield ScheduledRequest(place, due, next(requests))
            start = end

    def _iterate_times(self, phase_index: int, phase: LoadPhase, start: float) -> Iterator[float]:
        """Yield the times when a phase's requests are due, endlessly.  They are equally spaced, or a Poisson
        process.

        Args:
            phase_index: the phase's index, which is a part of the seed.
            start: of the phase, by the clock.
        """
        if phase.arrivals == "constant":
            for number in itertools.count():
                yield start + number / phase.rate
        numbers, now = np.random.default_rng([*self._seed, 1, phase_index]), start
        while True:
            for due in (now + np.cumsum(numbers.exponential(1 / phase.rate, _CHUNK))).tolist():
                yield due
                now = due
