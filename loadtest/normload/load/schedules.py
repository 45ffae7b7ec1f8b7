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
    """A scheduled request.

    Attributes:
        phase_index: index of its phase in the segment.
        due_at: its scheduled time by the clock, in seconds.
        request_index: its index in the pool.
    """

    phase_index: int
    due_at: float
    request_index: int


class RequestSchedule(Protocol):
    """A source of scheduled requests."""

    #: By the clock; requests that are due but not sent by then are not sent any more.
    cutoff: float

    def take_due(self, now: float) -> ScheduledRequest | float | None:
        """Take a request that is due now; else return the seconds until the next one, or None after the last or a
        stop.
        """

    def stop(self) -> None:
        """Schedule no more requests."""


class OpenLoopSchedule:
    """Requests of consecutive phases at their rates, independent of the responses to earlier ones."""

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
        """Take a request that is due now, as `RequestSchedule.take_due` defines it."""
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
    """A schedule with a request as soon as a connection has its response, until the phase ends.

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
        self._requests = draws.iterate_requests()

    def take_due(self, now: float) -> ScheduledRequest | float | None:
        """Take a request that is due now, as `RequestSchedule.take_due` defines it."""
        if now >= self._end:
            return None
        return self._start - now if now < self._start else ScheduledRequest(0, now, next(self._requests))

    def stop(self) -> None:
        """Schedule no more requests."""
        self._end = -math.inf


class ArrivalGenerator:
    """The random choices: the times between requests, and the requests themselves."""

    def __init__(self, seed: Sequence[int], shares: Sequence[float]) -> None:
        """Args:
        seed: of all random choices.
        shares: relative frequency of each request of the pool.
        """
        self._seed = seed
        self._shares = np.asarray(shares, np.float64) / sum(shares)

    def iterate_requests(self) -> Iterator[int]:
        """Yield an endless sequence of indices into the pool."""
        numbers = np.random.default_rng([*self._seed, 0])
        while True:
            yield from numbers.choice(len(self._shares), _CHUNK, p=self._shares).tolist()

    def iterate_schedule(self, phases: Sequence[LoadPhase], start: float) -> Iterator[ScheduledRequest]:
        """Yield every request of all phases."""
        requests = self.iterate_requests()
        for place, phase in enumerate(phases):
            end = start + phase.duration_s
            for due in self._iterate_times(place, phase, start):
                if due >= end:
                    break
                yield ScheduledRequest(place, due, next(requests))
            start = end

    def _iterate_times(self, place: int, phase: LoadPhase, start: float) -> Iterator[float]:
        if phase.arrivals == "constant":
            for number in itertools.count():
                yield start + number / phase.rate
        numbers, now = np.random.default_rng([*self._seed, 1, place]), start
        while True:
            for due in (now + np.cumsum(numbers.exponential(1 / phase.rate, _CHUNK))).tolist():
                yield due
                now = due
