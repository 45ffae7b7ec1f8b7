"""Results of phases with rising load: the knee of the latency, and the load that the server sustains."""

from collections.abc import Sequence
from dataclasses import dataclass

_KEEPS_UP = 0.95
_FEW_ERRORS = 0.01
# Smaller decreases of power are within the noise of a run.
_DECREASE = 0.8


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The results at one load of a sweep, which is a series of phases with different loads.

    Attributes:
        name: of the phase.
        offered: the scenario's rate, in requests per second.
        scheduled: requests per second of the schedule; random arrivals are around the offered rate.
        rate: successful requests per second, of those that ended during the phase.
        mean_s: mean latency of successful requests, from their scheduled time.
        errors: the fraction of all requests that failed.
    """

    name: str
    offered: float
    scheduled: float
    rate: float
    mean_s: float
    errors: float


@dataclass(frozen=True, slots=True)
class LoadSweep:
    """The results of a sweep, which is a series of phases with different loads.

    Attributes:
        knee: the load with the greatest power, the ratio of requests per second to mean latency.  Above
            it, more load adds more delay than throughput (L. Kleinrock, Power and deterministic rules
            of thumb, 1979).  None if that is the lowest load, or if no higher load has less than 80 %
            of its power: then the knee, if there is one, is outside the sweep.
        sustained: the greatest load whose rate was at least 95 % of the scheduled one with at most 1 %
            errors; None if no load was sustained.
        peak: the highest number of answered requests per second, at any load.
    """

    knee: SweepPoint | None
    sustained: SweepPoint | None
    peak: float


def evaluate_sweep(points: Sequence[SweepPoint]) -> LoadSweep | None:
    """Find a sweep's knee, sustained load and peak rate.  The knee is the load with the best ratio of rate to mean
    latency.

    Return None if fewer than three different loads were answered.
    """
    answered = sorted(
        (point for point in points if point.rate > 0 and point.mean_s > 0), key=lambda point: point.offered
    )
    if len({point.offered for point in answered}) < 3:
        return None
    best = max(answered, key=_compute_power)
    falls = any(
        point.offered > best.offered and _compute_power(point) < _DECREASE * _compute_power(best)
        for point in answered
    )
    held = [
        point for point in answered if point.rate >= _KEEPS_UP * point.scheduled and point.errors <= _FEW_ERRORS
    ]
    return LoadSweep(
        knee=best if falls and best.offered > answered[0].offered else None,
        sustained=held[-1] if held else None,
        peak=max(point.rate for point in answered),
    )


def _compute_power(point: SweepPoint) -> float:
    return point.rate / point.mean_s
