"""Changes between runs beyond noise.

With one run per side, the variation within each is estimated by a block bootstrap: its intervals are drawn a
thousand times with replacement, in short blocks, because neighbours are correlated.  A difference is a change if
its 99 % interval is beyond the usual difference between runs of one server on one machine.  A percentile that
is the maximum, of too few responses, is never a change: its interval is too narrow, because no draw exceeds it.

With several runs per side, the variation between runs is measured, which includes that within them.  Intervals are
Student's, of logarithms except for errors.  They are so wide (Bonferroni) that in 19 of 20 comparisons of equal
servers no number is called a change.

Source: H. R. Künsch, The jackknife and the bootstrap for general stationary observations, 1989.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normload.measurements.latency_histogram import compute_upper_bounds_s
from normload.measurements.results import PERCENTILES, PhaseSummary, RunResult
from normload.measurements.tallies import INTERVALS, RequestTotals

_DRAWS = 1000
_BLOCK = 4
_CONFIDENCE = (0.5, 99.5)
# Single runs differ by this much for reasons that do not vary within a run, such as memory placement.
_BETWEEN_RUNS = 0.05
# With several runs, smaller changes are irrelevant, even if they are beyond noise.
_SMALL = 0.01
_FALSE_ALARMS = 0.05
_FEW_ERRORS = 0.001
# With fewer responses above it, a percentile is the maximum.
_LEAST_ABOVE = 1.0

# Points of the integral of `compute_student_quantile`; its error is far below the accuracy of an interval.
_POINTS = 100_001

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """The values of one metric of one phase, before and after a change, with a confidence interval of the
    difference.

    Attributes:
        phase, metric: identify the number.
        before, after: its values; the mean of several runs.
        low, high: bounds of after/before; for errors, of the difference.
        spread_before, spread_after: the standard deviation between runs, relative to their mean except
            for errors; NaN for a single run.
        is_change: whether the difference is beyond noise.
        is_worse: whether it is a change for the worse.
        format_value: formats a value in the unit of the metric.
    """

    phase: str
    metric: str
    before: float
    after: float
    low: float
    high: float
    spread_before: float
    spread_after: float
    is_change: bool
    is_worse: bool
    format_value: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class _ComparedMetric:
    """A metric that is compared between runs.  Its function computes one value for each random draw of a phase's
    intervals of time.

    Attributes:
        name: in reports.
        more_is_better: whether an increase is good.
        format_value: formats a value.
        compute: from the number of times that each interval is drawn, [draws, intervals], to a value
            for each draw.
        fraction_above: of the latencies, which exceed a percentile; 1 of other metrics.
    """

    name: str
    more_is_better: bool
    format_value: Callable[[float], str]
    compute: "Callable[[Floats, _IntervalArrays], Floats]"
    fraction_above: float = 1.0


class _IntervalArrays:
    """The results of a phase as arrays, with one entry for each interval of time.

    If a phase is repeated, the intervals of all repetitions follow one another.
    """

    def __init__(self, part: PhaseSummary) -> None:
        cells: list[RequestTotals] = []
        seconds: list[float] = []
        for phase in part.phases:
            found, interval_s = phase.tally.sum_by_interval(), phase.tally.interval_s
            # Fewer of a run that was ended early, of which the last one is shorter.
            duration_s = phase.phase.duration_s
            count = min(INTERVALS, max(1, phase.tally.count_intervals(duration_s)))
            cells += [found.get(number, RequestTotals()) for number in range(count)]
            seconds += [min(interval_s, duration_s - number * interval_s) for number in range(count)]
        self.seconds = np.asarray(seconds)
        self.ok = np.asarray([cell.ok for cell in cells], np.float64)
        self.requests = np.asarray([cell.requests for cell in cells], np.float64)
        self.moved = np.asarray([cell.moved_bytes for cell in cells], np.float64)
        self.kernel_bytes = np.asarray([cell.kernel_bytes for cell in cells], np.float64)
        self.kernel_s = np.asarray([cell.kernel_s for cell in cells])
        counts = np.stack([cell.latency.counts for cell in cells])
        (used,) = np.nonzero(counts.sum(0))
        self.counts = counts[:, used].astype(np.float64)
        longest_s = max(cell.latency.max_s for cell in cells)
        self.upper_s = np.minimum(compute_upper_bounds_s(used), longest_s)

    def __len__(self) -> int:
        return len(self.seconds)

    def compute_percentiles(self, draw_counts: Floats, percent: float) -> Floats:
        """Compute a percentile of the latencies for each random draw of intervals.  An interval counts as often as
        it was drawn.

        Args:
            draw_counts: how often each interval was drawn, [draws, intervals].
        """
        if not len(self.upper_s):
            return np.full(len(draw_counts), math.nan)
        cumulated = np.cumsum(draw_counts @ self.counts, axis=1)
        rank = np.maximum(1.0, np.ceil(cumulated[:, -1:] * percent / 100 - 1e-6))
        found: Floats = np.where(cumulated[:, -1] > 0, self.upper_s[np.argmax(cumulated >= rank, axis=1)], math.nan)
        return found


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    found: Floats = np.divide(numerator, denominator, out=np.full(len(numerator), math.nan), where=denominator > 0)
    return found


def _make_percentile_metric(percent: float) -> _ComparedMetric:
    """Make the metric of a percentile of latency."""
    return _ComparedMetric(
        f"p{percent:g}",
        False,
        lambda value: f"{value * 1e3:.2f} ms",
        lambda times, of: of.compute_percentiles(times, percent),
        1 - percent / 100,
    )


ERRORS = "errors"

_METRICS = (
    _ComparedMetric(
        "rate", True, lambda value: f"{value:.1f}/s", lambda times, of: _divide(times @ of.ok, times @ of.seconds)
    ),
    _ComparedMetric(
        "served",
        True,
        lambda value: f"{value / 1e9:.3f} GB/s",
        lambda times, of: _divide(times @ of.moved, times @ of.seconds),
    ),
    _ComparedMetric(
        "kernels",
        True,
        lambda value: f"{value / 1e9:.2f} GB/s",
        lambda times, of: _divide(times @ of.kernel_bytes, times @ of.kernel_s),
    ),
    *(_make_percentile_metric(percent) for percent in PERCENTILES),
    _ComparedMetric(
        ERRORS,
        False,
        lambda value: f"{value:.3%}",
        lambda times, of: _divide(times @ (of.requests - of.ok), times @ of.requests),
    ),
)


def compare_runs(before: Sequence[RunResult], after: Sequence[RunResult]) -> list[MetricComparison]:
    """Compare every metric of every phase between runs before and runs after a change.

    Args:
        before, after: one run each, or several on at least one side.

    Raises:
        ValueError: the runs are of different scenarios.
    """
    first = before[0]
    names = [part.name for part in first.summarise_phases()]
    for run in (*before, *after):
        if run.scenario != first.scenario or [part.name for part in run.summarise_phases()] != names:
            raise ValueError(
                f"runs must be of one scenario and its phases, got {first.scenario!r} and {run.scenario!r}"
            )
    sides = [
        [[_IntervalArrays(part) for part in run.summarise_phases()] for run in side] for side in (before, after)
    ]
    random = np.random.default_rng(0)
    changes = []
    for number, name in enumerate(names):
        old, new = ([run[number] for run in side] for side in sides)
        if len(old) == len(new) == 1:
            drawn = _draw_intervals(len(old[0]), random), _draw_intervals(len(new[0]), random)
            changes += [_compare_single_runs(name, metric, old[0], new[0], drawn) for metric in _METRICS]
        else:
            confidence = 1 - _FALSE_ALARMS / (len(names) * len(_METRICS))
            changes += [_compare_repeated_runs(name, metric, old, new, confidence) for metric in _METRICS]
    return changes


def describe_load_differences(before: Sequence[RunResult], after: Sequence[RunResult]) -> list[str]:
    """Describe the phases whose offered loads or durations differ by more than 5 %.

    Latencies at different loads are hardly comparable.  In a longer phase the high percentiles are of more
    requests, and effects of time, such as caches that fill, weigh differently.
    """
    sentences = []
    for number, part in enumerate(before[0].summarise_phases()):
        old, new = ([run.summarise_phases()[number] for run in side] for side in (before, after))
        offered = [float(np.mean([each.offered for each in side])) for side in (old, new)]
        if abs(offered[0] - offered[1]) > _BETWEEN_RUNS * offered[0]:
            sentences.append(f"{part.name}: offered {offered[0]:.1f}/s before and {offered[1]:.1f}/s after.")
        seconds = [float(np.mean([each.duration_s for each in side])) for side in (old, new)]
        if abs(seconds[0] - seconds[1]) > _BETWEEN_RUNS * seconds[0]:
            sentences.append(f"{part.name}: {seconds[0]:.1f} s before and {seconds[1]:.1f} s after.")
    return sentences


def _compare_single_runs(
    phase: str, metric: _ComparedMetric, old: _IntervalArrays, new: _IntervalArrays, drawn: tuple[Floats, Floats]
) -> MetricComparison:
    """Compare a metric between one run before and one run after a change.

    The interval of the difference is computed from random draws of the runs' intervals.  The spread
    between runs is unknown (NaN); smaller differences than the usual spread are no change.

    Args:
        drawn: for each run, how often each interval was drawn, [draws, intervals].
    """
    before, after = _compute_value(metric, old), _compute_value(metric, new)
    first, second = metric.compute(drawn[0], old), metric.compute(drawn[1], new)
    if metric.name == ERRORS:
        draws, none = second - first, 0.0
    else:
        draws, none = _divide(second, first), 1.0
    finite_draws = draws[np.isfinite(draws)]
    low, high = np.percentile(finite_draws, _CONFIDENCE).tolist() if len(finite_draws) else (none, none)
    above = metric.fraction_above * min(old.ok.sum(), new.ok.sum())
    is_percentile = metric.fraction_above < 1
    least = math.inf if is_percentile and above < _LEAST_ABOVE else _BETWEEN_RUNS
    return _evaluate_change(phase, metric, (before, after), (low, high), (math.nan, math.nan), least)


def _compare_repeated_runs(
    phase: str,
    metric: _ComparedMetric,
    old: Sequence[_IntervalArrays],
    new: Sequence[_IntervalArrays],
    confidence: float,
) -> MetricComparison:
    """Compare the means of a metric over several runs, with a confidence interval from the spread between runs.

    The interval is that of the ratio of the means, for errors that of their difference.
    """
    before, after = ([_compute_value(metric, run) for run in side] for side in (old, new))
    means = float(np.mean(before)), float(np.mean(after))
    if metric.name == ERRORS:
        all_finite = all(map(math.isfinite, (*before, *after)))
        bounds = compute_difference_interval(before, after, confidence) if all_finite else (0.0, 0.0)
    elif all(0 < value < math.inf for value in (*before, *after)):
        low, high = compute_difference_interval(np.log(before).tolist(), np.log(after).tolist(), confidence)
        # Larger than any change, and still finite.
        bounds = math.exp(max(low, -50.0)), math.exp(min(high, 50.0))
    else:
        bounds = (1.0, 1.0)
    spreads = _compute_relative_deviation(metric, before), _compute_relative_deviation(metric, after)
    return _evaluate_change(phase, metric, means, bounds, spreads, _SMALL)


def compute_difference_interval(
    before: Sequence[float], after: Sequence[float], confidence: float
) -> tuple[float, float]:
    """Compute a confidence interval of the mean of `after` minus the mean of `before`.

    The numbers are assumed to have equal spread in both sets.

    Args:
        before, after: a number for each run; three or more together, all finite.
        confidence: the fraction of such intervals that contain the true difference, below 1.
    """
    degrees = len(before) + len(after) - 2
    squares = sum(float(np.var(side)) * len(side) for side in (before, after))
    error = math.sqrt(squares / degrees * (1 / len(before) + 1 / len(after)))
    difference = float(np.mean(after)) - float(np.mean(before))
    reach = error * compute_student_quantile((1 + confidence) / 2, degrees)
    return difference - reach, difference + reach


@functools.cache
def compute_student_quantile(probability: float, degrees: int) -> float:
    """Compute the quantile of Student's t distribution.

    With t = √degrees · tan(angle) its density is that of cos(angle)^(degrees - 1), which is
    integrated here.
    """
    angle = np.linspace(-math.pi / 2, math.pi / 2, _POINTS)
    density = np.cos(angle) ** (degrees - 1)
    sums = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return math.sqrt(degrees) * math.tan(float(np.interp(probability * sums[-1], sums, angle)))


def _compute_relative_deviation(metric: _ComparedMetric, values: Sequence[float]) -> float:
    """Compute the standard deviation of a metric between runs, divided by the metric's mean; NaN for one run.  The
    metric `ERRORS` is not divided by its mean.
    """
    if len(values) < 2:
        return math.nan
    deviation, mean = float(np.std(values, ddof=1)), float(np.mean(values))
    if metric.name == ERRORS:
        return deviation
    return deviation / mean if mean else math.nan


def _compute_value(metric: _ComparedMetric, run: _IntervalArrays) -> float:
    return float(metric.compute(np.ones((1, len(run))), run)[0])


def _evaluate_change(
    phase: str,
    metric: _ComparedMetric,
    values: tuple[float, float],
    bounds: tuple[float, float],
    spreads: tuple[float, float],
    least: float,
) -> MetricComparison:
    """Decide whether a metric has changed, and return the comparison.  It has changed if the entire confidence
    interval is beyond `least`.

    Args:
        values: of the metric, before and after.
        bounds: of the interval of after/before, or for errors of the difference.
        spreads: between runs, before and after.
        least: smallest relative change that counts; errors have a fixed one.
    """
    low, high = bounds
    band = (-_FEW_ERRORS, _FEW_ERRORS) if metric.name == ERRORS else (1 / (1 + least), 1 + least)
    rises, falls = low > band[1], high < band[0]
    is_worse = falls if metric.more_is_better else rises
    return MetricComparison(
        phase, metric.name, *values, low, high, *spreads, rises or falls, is_worse, metric.format_value
    )


def _draw_intervals(count: int, random: np.random.Generator) -> Floats:
    """Draw a phase's intervals at random a thousand times: each draw takes `count` intervals with replacement, in
    blocks of neighbours.

    Return how often each was drawn, [draws, count].
    """
    blocks = math.ceil(count / _BLOCK)
    starts = random.integers(0, max(1, count - _BLOCK + 1), (_DRAWS, blocks))
    drawn = (starts[:, :, None] + np.arange(_BLOCK)).reshape(_DRAWS, -1)[:, :count]
    times = np.zeros((_DRAWS, count))
    np.add.at(times, (np.arange(_DRAWS)[:, None], drawn), 1)
    return times
