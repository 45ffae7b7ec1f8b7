"""Records of requests, and their sums and histograms of bounded size, which can be merged."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from normload.measurements.latency_histogram import LatencyHistogram

#: Number of parts of a phase's time with separate sums, for plots and to measure the variation.
INTERVALS = 60

OK = "ok"
NOT_SENT = "not_sent"

# Reasons for a missing response: no or a broken connection; a timeout; bytes that are not a valid response.
CONNECTION_FAILED = "connection_failed"
TIMEOUT = "timeout"
UNEXPECTED_ANSWER = "unexpected_answer"

MAX_FAULTS = 5


class RequestOutcome(NamedTuple):
    """The outcome of one request; times in seconds since the phase's beginning.

    Attributes:
        operation: as in the API's path.
        due_s: its scheduled time.
        free_s: when a connection was free to send it.
        sent_s: when it was sent.
        ended_s: when the response was complete, or no longer expected.
        status: of HTTP, 0 without a response.
        code: "ok", the API's code of an error, or the reason for a missing response.
        sent_bytes, received_bytes: of bodies.
        kernel_bytes, kernel_s: device bytes and time as reported by the server; this request's part of a launch.
        checked: whether the response was compared with the expected one.
        fault: the fault of a wrong response.
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


def format_error(status: int, code: str) -> str:
    """Format an error: its status and code, or one of them if there is no other."""
    return f"{status} {code}" if status and code != str(status) else code


@dataclass(slots=True)
class RequestTotals:
    """The counts, latencies and summed bytes of requests, such as those of one operation in one interval.

    Attributes:
        outcomes: counts by status and code.
        latency: of the successful ones, from their scheduled times.
        sent_bytes, received_bytes, kernel_bytes, kernel_s: of the successful ones.
    """

    outcomes: Counter[tuple[int, str]] = field(default_factory=Counter)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    sent_bytes: int = 0
    received_bytes: int = 0
    kernel_bytes: int = 0
    kernel_s: float = 0.0

    def merge(self, other: "RequestTotals") -> None:
        """Add the counts, latencies and sums of another object to this one."""
        self.outcomes.update(other.outcomes)
        self.latency.merge(other.latency)
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.kernel_bytes += other.kernel_bytes
        self.kernel_s += other.kernel_s

    @property
    def requests(self) -> int:
        """The number of requests, including those that were never sent."""
        return self.outcomes.total()

    @property
    def ok(self) -> int:
        """The number of successful requests."""
        return sum(count for (_, code), count in self.outcomes.items() if code == OK)

    @property
    def errors(self) -> int:
        """The number of failed requests."""
        return self.requests - self.ok

    @property
    def moved_bytes(self) -> int:
        """Bytes in both directions."""
        return self.sent_bytes + self.received_bytes

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON document."""
        return {
            "outcomes": [[status, code, count] for (status, code), count in self.outcomes.items()],
            "latency": self.latency.to_json(),
            **{name: getattr(self, name) for name in _SUMS},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Make totals from a document of `to_json`."""
        outcomes = Counter({(status, code): count for status, code, count in document["outcomes"]})
        sums = {name: document[name] for name in _SUMS}
        return cls(outcomes, LatencyHistogram.from_json(document["latency"]), **sums)


_SUMS = ("sent_bytes", "received_bytes", "kernel_bytes", "kernel_s")


class PhaseTally:
    """The results of all requests of a phase, summed by operation and interval of time.

    Attributes:
        interval_s: 1 / `INTERVALS` of the phase's time; later responses are in additional intervals.
        cells: by operation and interval.
        service: latency of successful requests from the time when they were sent.
        lag: delay that the load test itself added before it sent requests.
        checked: number of responses that were compared with the expected ones.
        wrong: number of those that differed.
        faults: descriptions of the first of them.
    """

    def __init__(self, duration_s: float) -> None:
        self.interval_s = duration_s / INTERVALS
        self.cells: dict[tuple[str, int], RequestTotals] = {}
        self.service = LatencyHistogram()
        self.lag = LatencyHistogram()
        self.checked = 0
        self.wrong = 0
        self.faults: list[str] = []

    def add_records(self, records: Iterable[RequestOutcome]) -> None:
        """Add the records of requests that have ended to the sums, histograms and faults."""
        latencies: dict[tuple[str, int], list[float]] = {}
        service, lag = [], []
        for record in records:
            key = record.operation, int(record.ended_s / self.interval_s)
            cell = self.cells.setdefault(key, RequestTotals())
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
                self._add_fault(record.operation, record.fault)
        for key, values in latencies.items():
            self.cells[key].latency.add_seconds(values)
        self.service.add_seconds(service)
        self.lag.add_seconds(lag)

    def merge(self, other: "PhaseTally") -> None:
        """Add the results of another client process's requests in the same phase."""
        for key, cell in other.cells.items():
            self.cells.setdefault(key, RequestTotals()).merge(cell)
        self.service.merge(other.service)
        self.lag.merge(other.lag)
        self.checked += other.checked
        self.wrong += other.wrong
        self.faults = (self.faults + other.faults)[:MAX_FAULTS]

    def sum_all(self, operation: str | None = None) -> RequestTotals:
        """Sum the requests of an operation over all intervals of the phase; None sums all operations."""
        total = RequestTotals()
        for (of, _), cell in self.cells.items():
            if operation in (None, of):
                total.merge(cell)
        return total

    def sum_in_time(self, operation: str | None = None, within_s: float | None = None) -> RequestTotals:
        """Sum the requests that ended within `within_s` seconds of the phase's start.  Rates are computed from this
        sum.

        Args:
            operation: None for all operations.
            within_s: the time, as in `count_intervals`; None for the phase's duration.
        """
        intervals = INTERVALS if within_s is None else self.count_intervals(within_s)
        total = RequestTotals()
        for (of, interval), cell in self.cells.items():
            if operation in (None, of) and interval < intervals:
                total.merge(cell)
        return total

    def count_intervals(self, within_s: float) -> int:
        """Return how many intervals have begun within `within_s` seconds of the phase's start.

        In a run that was ended early, the last one has no requests after that time.
        """
        # Less a hundredth: the quotient of a whole number of intervals may be somewhat more than that number.
        return math.ceil(within_s / self.interval_s - 0.01)

    def list_operations(self) -> list[str]:
        """List the operations that occur, sorted."""
        return sorted({operation for operation, _ in self.cells})

    def sum_by_interval(self) -> dict[int, RequestTotals]:
        """Sum the requests of all operations in each interval; return the sums by the interval's number."""
        found: dict[int, RequestTotals] = {}
        for (_, interval), cell in sorted(self.cells.items()):
            found.setdefault(interval, RequestTotals()).merge(cell)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON document."""
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
        """Make a tally from a document of `to_json`."""
        made = cls(document["interval_s"] * INTERVALS)
        cells = document["cells"]
        made.cells = {(operation, interval): RequestTotals.from_json(cell) for operation, interval, cell in cells}
        made.service = LatencyHistogram.from_json(document["service"])
        made.lag = LatencyHistogram.from_json(document["lag"])
        made.checked, made.wrong = document["checked"], document["wrong"]
        made.faults = list(document["faults"])
        return made

    def _add_fault(self, operation: str, fault: str) -> None:
        self.wrong += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{operation}: {fault}")


def compute_rate(amount: float, seconds: float) -> float:
    """Compute a rate; NaN if the time is 0."""
    return amount / seconds if seconds > 0 else math.nan
