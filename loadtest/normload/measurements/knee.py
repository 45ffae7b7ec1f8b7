"""Where a server's latency bends, from phases of rising load."""

from collections.abc import Sequence
from dataclasses import dataclass

_KEEPS_UP = 0.95
_FEW_ERRORS = 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """One phase of a sweep.

    Attributes:
        name: of the phase.
        offered: requests a second on the schedule.
        rate: answered in time, a second.
        mean_s: latency of those, from when they were due.
        errors: the part of all requests that failed.
    """

    name: str
    offered: float
    rate: float
    mean_s: float
    errors: float


@dataclass(frozen=True, slots=True)
class Knee:
    """What a sweep found.

    Attributes:
        knee: the load with the greatest power, requests a second over their mean latency.  Beyond it, more load
            buys more delay than throughput (L. Kleinrock, Power and deterministic rules of thumb, 1979).
        sustained: the greatest load that was answered as fast as it came; None where none was.
        peak: the most requests a second that were answered, at any load.
    """

    knee: Point
    sustained: Point | None
    peak: float


def find_knee(points: Sequence[Point]) -> Knee | None:
    """Find the knee of a sweep; None where it is none, being of fewer than three loads that were answered."""
    answered = [point for point in points if point.rate > 0 and point.mean_s > 0]
    if len({point.offered for point in answered}) < 3:
        return None
    held = [point for point in answered if point.rate >= _KEEPS_UP * point.offered and point.errors <= _FEW_ERRORS]
    return Knee(
        knee=max(answered, key=lambda point: point.rate / point.mean_s),
        sustained=max(held, key=lambda point: point.offered, default=None),
        peak=max(point.rate for point in answered),
    )
