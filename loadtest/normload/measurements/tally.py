"""Records of requests, and their sums and histograms of bounded size, which can be merged."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from normload.measurements.histogram import Histogram

#: Parts of a phase's time for which sums are kept apart, for plots and to know how much they vary.
INTERVALS = 60

OK = "ok"
NOT_SENT = "not_sent"

# What kept an answer away: no connection, or a broken one; none in time; bytes that are no answer to the request.
CONNECTION_FAILED = "connection_failed"
TIMEOUT = "timeout"
UNEXPECTED_ANSWER = "unexpected_answer"

FAULTS_KEPT = 5


class Record(NamedTuple):
    """One request and how it ended; times in seconds since the phase's beginning.

    Attributes:
        operation: as in the API's path.
        due_s: when it was meant to be sent.
        free_s: when a connection was free to send it.
        sent_s: when it was sent.
        ended_s: when the answer was complete, or none was to be expected any more.
        status: of HTTP, 0 without an answer.
        code: "ok", the API's code of an error, or what kept the answer away.
        sent_bytes, received_bytes: of bodies.
        kernel_bytes, kernel_s: what the server says of its device; of a launch this request's part.
        checked: whether the answer was compared with the right one.
        fault: what was wrong with it.
    """

    operation: str
    due_s: float
    free_s: float
    sent_s: float
    ended_s: float
    status: int
    code: str
    sent_bytes: int = 0
    received_bytes: int = 0
    kernel_bytes: int = 0
    kernel_s: float = 0.0
    checked: bool = False
    fault: str | None = None


@dataclass(slots=True)
class Cell:
    """Requests of one operation that ended in one interval.

    Attributes:
        outcomes: how many by status and code.
        latency: of the successful ones, from when they were due.
        sent_bytes, received_bytes, kernel_bytes, kernel_s: of the successful ones.
    """

    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    latency: Histogram = field(default_factory=Histogram)
    sent_bytes: int = 0
    received_bytes: int = 0
    kernel_bytes: int = 0
    kernel_s: float = 0.0

    def merge(self, other: "Cell") -> None:
        """Add another's."""
        self.outcomes.update(other.outcomes)
        self.latency.merge(other.latency)
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.kernel_bytes += other.kernel_bytes
        self.kernel_s += other.kernel_s

    @property
    def requests(self) -> int:
        """All of them, those included that were never sent."""
        return self.outcomes.total()

    @property
    def ok(self) -> int:
        """The successful ones."""
        return sum(count for (_, code), count in self.outcomes.items() if code == OK)

    @property
    def errors(self) -> int:
        """The others."""
        return self.requests - self.ok

    @property
    def moved_bytes(self) -> int:
        """In and out."""
        return self.sent_bytes + self.received_bytes

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "outcomes": [[status, code, count] for (status, code), count in self.outcomes.items()],
            "latency": self.latency.to_json(),
            **{name: getattr(self, name) for name in _SUMS},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        outcomes = Counter({(status, code): count for status, code, count in document["outcomes"]})
        sums = {name: document[name] for name in _SUMS}
        return cls(outcomes, Histogram.from_json(document["latency"]), **sums)


_SUMS = ("sent_bytes", "received_bytes", "kernel_bytes", "kernel_s")


class Tally:
    """All requests of a phase.

    Attributes:
        interval_s: the phase's time in `INTERVALS` parts; answers that come later are in parts after those.
        cells: by operation and interval.
        service: latency of successful requests from when they were really sent.
        lag: how much later than it could the harness itself began to send.
        checked: answers that were compared with the right ones.
        wrong: those that differed.
        faults: what was wrong with the first of them.
    """

    def __init__(self, duration_s: float) -> None:
        self.interval_s = duration_s / INTERVALS
        self.cells: dict[tuple[str, int], Cell] = {}
        self.service = Histogram()
        self.lag = Histogram()
        self.checked = 0
        self.wrong = 0
        self.faults: list[str] = []

    def add(self, records: Iterable[Record]) -> None:
        """Count these."""
        latencies: dict[tuple[str, int], list[float]] = {}
        service, lag = [], []
        for record in records:
            key = record.operation, int(record.ended_s / self.interval_s)
            cell = self.cells.setdefault(key, Cell())
            cell.outcomes[record.status, record.code] += 1
            if record.code != NOT_SENT:
                lag.append(max(0.0, record.sent_s - max(record.due_s, record.free_s)))
            if record.code == OK:
                latencies.setdefault(key, []).append(max(0.0, record.ended_s - record.due_s))
                service.append(record.ended_s - record.sent_s)
                cell.sent_bytes += record.sent_bytes
                cell.received_bytes += record.received_bytes
                cell.kernel_bytes += record.kernel_bytes
                cell.kernel_s += record.kernel_s
            self.checked += record.checked
            if record.fault is not None:
                self._note(record.operation, record.fault)
        for key, values in latencies.items():
            self.cells[key].latency.add(values)
        self.service.add(service)
        self.lag.add(lag)

    def merge(self, other: "Tally") -> None:
        """Add another process's share of the phase."""
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Cell()).merge(cell)
        self.service.merge(other.service)
        self.lag.merge(other.lag)
        self.checked += other.checked
        self.wrong += other.wrong
        self.faults = (self.faults + other.faults)[:FAULTS_KEPT]

    def total(self, operation: str | None = None) -> Cell:
        """Everything, or everything of one operation."""
        total = Cell()
        for (of, _), cell in self.cells.items():
            if operation in (None, of):
                total.merge(cell)
        return total

    def in_time(self, operation: str | None = None, within_s: float | None = None) -> Cell:
        """What ended within a time, the phase's own if none is given: what rates are made of."""
        intervals = INTERVALS if within_s is None else round(within_s / self.interval_s)
        total = Cell()
        for (of, interval), cell in self.cells.items():
            if operation in (None, of) and interval < intervals:
                total.merge(cell)
        return total

    def operations(self) -> list[str]:
        """Those that occur."""
        return sorted({operation for operation, _ in self.cells})

    def intervals(self) -> dict[int, Cell]:
        """All operations together, by interval."""
        found: dict[int, Cell] = {}
        for (_, interval), cell in sorted(self.cells.items()):
            found.setdefault(interval, Cell()).merge(cell)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "interval_s": self.interval_s,
            "cells": [[operation, interval, cell.to_json()] for (operation, interval), cell in self.cells.items()],
            "service": self.service.to_json(),
            "lag": self.lag.to_json(),
            "checked": self.checked,
            "wrong": self.wrong,
            "faults": self.faults,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        made = cls(document["interval_s"] * INTERVALS)
        cells = document["cells"]
        made.cells = {(operation, interval): Cell.from_json(cell) for operation, interval, cell in cells}
        made.service = Histogram.from_json(document["service"])
        made.lag = Histogram.from_json(document["lag"])
        made.checked, made.wrong = document["checked"], document["wrong"]
        made.faults = list(document["faults"])
        return made

    def _note(self, operation: str, fault: str) -> None:
        self.wrong += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(f"{operation}: {fault}")


def per_second(amount: float, seconds: float) -> float:
    """A rate; NaN where there is no time."""
    return amount / seconds if seconds > 0 else math.nan
