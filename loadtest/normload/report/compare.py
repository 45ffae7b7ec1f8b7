"""What changed between two runs beyond noise.

How much a run varies by itself is seen from its parts: each phase's intervals are drawn anew a thousand times,
with repetition, in short blocks, as neighbours resemble each other.  A number is a change when 99 of 100 draws
leave it on the same side of what it was, by more than what runs of one server on one machine differ by anyway.

Source: H. R. Künsch, The jackknife and the bootstrap for general stationary observations, 1989.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from normload.measurements.histogram import upper_s
from normload.measurements.result import PERCENTILES, Part, Result
from normload.measurements.tally import INTERVALS, Cell

Floats = NDArray[np.float64]

_DRAWS = 1000
_BLOCK = 4
_CONFIDENCE = (0.5, 99.5)
# Runs differ by this much for reasons that no run contains: where memory lies, what else the machine does.
_BETWEEN_RUNS = 0.05
_FEW_ERRORS = 0.001


@dataclass(frozen=True, slots=True)
class Change:
    """A number of both runs.

    Attributes:
        phase, metric: whose and which.
        before, after: its values.
        low, high: bounds of after/before; of errors, of the difference.
        is_change: whether it is beyond noise.
        is_worse: whether it is, and for the worse.
        shown: writes a value in the unit of the metric.
    """

    phase: str
    metric: str
    before: float
    after: float
    low: float
    high: float
    is_change: bool
    is_worse: bool
    shown: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class _Metric:
    """How a number comes from drawn intervals.

    Attributes:
        name: for the reader.
        more_is_better: whether an increase is good.
        shown: writes a value.
        of: from the number of times that each interval is drawn, [draws, intervals], to a value for each draw.
    """

    name: str
    more_is_better: bool
    shown: Callable[[float], str]
    of: "Callable[[Floats, _Intervals], Floats]"


class _Intervals:
    """The intervals of a part as arrays, one entry an interval."""

    def __init__(self, part: Part) -> None:
        cells: list[Cell] = []
        seconds: list[float] = []
        for phase in part.phases:
            found = phase.tally.intervals()
            cells += [found.get(number, Cell()) for number in range(INTERVALS)]
            seconds += [phase.tally.interval_s] * INTERVALS
        self.seconds = np.asarray(seconds)
        self.ok = np.asarray([cell.ok for cell in cells], np.float64)
        self.requests = np.asarray([cell.requests for cell in cells], np.float64)
        self.moved = np.asarray([cell.moved_bytes for cell in cells], np.float64)
        self.kernel_bytes = np.asarray([cell.kernel_bytes for cell in cells], np.float64)
        self.kernel_s = np.asarray([cell.kernel_s for cell in cells])
        counts = np.stack([cell.latency.counts for cell in cells])
        (used,) = np.nonzero(counts.sum(0))
        self.counts = counts[:, used].astype(np.float64)
        self.upper_s = upper_s(used)

    def __len__(self) -> int:
        return len(self.seconds)

    def percentile(self, times: Floats, percent: float) -> Floats:
        """Of the latencies in the drawn intervals, each as often as it was drawn."""
        if not len(self.upper_s):
            return np.full(len(times), math.nan)
        cumulated = np.cumsum(times @ self.counts, axis=1)
        rank = np.maximum(1.0, np.ceil(cumulated[:, -1:] * percent / 100 - 1e-6))
        found: Floats = np.where(cumulated[:, -1] > 0, self.upper_s[np.argmax(cumulated >= rank, axis=1)], math.nan)
        return found


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    found: Floats = np.divide(numerator, denominator, out=np.full(len(numerator), math.nan), where=denominator > 0)
    return found


def _percentile(percent: float) -> _Metric:
    return _Metric(
        f"p{percent:g}",
        False,
        lambda value: f"{value * 1e3:.2f} ms",
        lambda times, of: of.percentile(times, percent),
    )


_ERRORS = "errors"

_METRICS = (
    _Metric(
        "rate", True, lambda value: f"{value:.1f}/s", lambda times, of: _ratio(times @ of.ok, times @ of.seconds)
    ),
    _Metric(
        "end to end",
        True,
        lambda value: f"{value / 1e9:.3f} GB/s",
        lambda times, of: _ratio(times @ of.moved, times @ of.seconds),
    ),
    _Metric(
        "kernels",
        True,
        lambda value: f"{value / 1e9:.2f} GB/s",
        lambda times, of: _ratio(times @ of.kernel_bytes, times @ of.kernel_s),
    ),
    *(_percentile(percent) for percent in PERCENTILES),
    _Metric(
        _ERRORS,
        False,
        lambda value: f"{value:.3%}",
        lambda times, of: _ratio(times @ (of.requests - of.ok), times @ of.requests),
    ),
)


def compare(before: Result, after: Result) -> list[Change]:
    """Compare every number of every phase.

    Raises:
        ValueError: the runs did not do the same.
    """
    parts = {part.name: part for part in after.parts()}
    if before.scenario != after.scenario or parts.keys() != {part.name for part in before.parts()}:
        raise ValueError(
            f"runs must be of one scenario and its phases, got {before.scenario!r} and {after.scenario!r}"
        )
    random = np.random.default_rng(0)
    changes = []
    for part in before.parts():
        old, new = _Intervals(part), _Intervals(parts[part.name])
        drawn = _draws(len(old), random), _draws(len(new), random)
        changes += [_change(part.name, metric, old, new, drawn) for metric in _METRICS]
    return changes


def loads_differ(before: Result, after: Result) -> list[str]:
    """Phases whose schedules offered another load, so that their latencies say little; in sentences."""
    sentences = []
    for old, new in zip(before.parts(), after.parts(), strict=True):
        if abs(old.offered - new.offered) > _BETWEEN_RUNS * old.offered:
            sentences.append(f"{old.name}: offered {old.offered:.1f}/s before and {new.offered:.1f}/s after.")
    return sentences


def show(console: Console, changes: Sequence[Change]) -> None:
    """Print what changed, or that nothing did."""
    changed = [change for change in changes if change.is_change]
    if not changed:
        console.print(f"Nothing changed beyond noise: {len(changes)} numbers compared.")
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in ("phase", "number"):
        table.add_column(heading, no_wrap=True)
    for heading in ("before", "after", "change", "99 % within"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in changed:
        table.add_row(
            change.phase,
            change.metric,
            change.shown(change.before),
            change.shown(change.after),
            *_how_much(change),
            style="red" if change.is_worse else "green",
        )
    console.print(table)


def _how_much(change: Change) -> tuple[str, str]:
    if change.metric == _ERRORS:
        return f"{change.after - change.before:+.2%}", f"{change.low:+.2%} to {change.high:+.2%}"
    by = change.after / change.before - 1
    return f"{by:+.1%}", f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"


def _change(phase: str, metric: _Metric, old: _Intervals, new: _Intervals, drawn: tuple[Floats, Floats]) -> Change:
    before, after = (float(metric.of(np.ones((1, len(of))), of)[0]) for of in (old, new))
    first, second = metric.of(drawn[0], old), metric.of(drawn[1], new)
    if metric.name == _ERRORS:
        spread, none, band = second - first, 0.0, (-_FEW_ERRORS, _FEW_ERRORS)
    else:
        spread, none, band = _ratio(second, first), 1.0, (1 / (1 + _BETWEEN_RUNS), 1 + _BETWEEN_RUNS)
    known = spread[np.isfinite(spread)]
    low, high = np.percentile(known, _CONFIDENCE).tolist() if len(known) else (none, none)
    rises, falls = low > band[1], high < band[0]
    is_worse = falls if metric.more_is_better else rises
    return Change(phase, metric.name, before, after, low, high, rises or falls, is_worse, metric.shown)


def _draws(count: int, random: np.random.Generator) -> Floats:
    """How often each interval is drawn, in blocks of neighbours: [draws, count]."""
    blocks = math.ceil(count / _BLOCK)
    starts = random.integers(0, max(1, count - _BLOCK + 1), (_DRAWS, blocks))
    drawn = (starts[:, :, None] + np.arange(_BLOCK)).reshape(_DRAWS, -1)[:, :count]
    times = np.zeros((_DRAWS, count))
    np.add.at(times, (np.arange(_DRAWS)[:, None], drawn), 1)
    return times
