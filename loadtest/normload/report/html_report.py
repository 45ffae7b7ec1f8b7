"""A run as one HTML file: the contents of the terminal's report, and plots; it loads no other file."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from normload.measurements.objective_outcomes import Outcome
from normload.measurements.results import PERCENTILES, PhaseResult, RunResult
from normload.measurements.tallies import OK, RequestTotals, compute_rate
from normload.report import report_tables

# The smallest distance between points of a plot over time.
_POINT_S = 0.25
# In thousandths: a phase that covers this much of a bin covers all of it, except for rounding.
_WHOLE = 999
_CURVE = (0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9)


def render_html(result: RunResult, outcomes: Sequence[Outcome] = ()) -> str:
    """Render a run as one HTML page.

    Args: outcomes: the run's objectives with their results.
    """
    assets = resources.files("normload.report") / "assets"

    def read_asset(name: str) -> str:
        return (assets / name).read_text("utf-8")

    return Template(read_asset("page.html")).substitute(
        title=escape(f"normload: {result.scenario}"),
        style=read_asset("uPlot.min.css") + read_asset("page.css"),
        script=read_asset("uPlot.iife.min.js") + read_asset("page.js"),
        description=escape(result.description),
        facts=_render_facts(report_tables.list_facts(result)),
        sentences="".join(f"<p>{escape(sentence)}</p>" for sentence in report_tables.list_sentences(result)),
        remarks="".join(f"<p>{escape(remark)}</p>" for remark in (*result.faults, *result.remarks)),
        objectives=_render_table(report_tables.OBJECTIVE_HEADINGS, report_tables.make_objective_rows(outcomes)),
        phases=_render_table(report_tables.PART_HEADINGS, report_tables.make_phase_rows(result)),
        operations=_render_table(report_tables.OPERATION_HEADINGS, report_tables.make_operation_rows(result)),
        data=_encode_script_json(make_plot_data(result)),
    )


def make_plot_data(result: RunResult) -> dict[str, Any]:
    """Make the plotted numbers in uPlot's form: columns, of which the first is x; None is a gap."""
    return {
        "time": _make_time_series(result),
        "latency": _make_percentile_curves(result),
        "load": _make_load_curves(result),
    }


def _make_time_series(result: RunResult) -> dict[str, Any]:
    """Make the plots over the run's time: rates, latencies, errors, and bandwidths with their upper bounds."""
    bins = _make_bins(result.phases)
    outcomes = sorted({outcome for each in bins if each.cell for outcome in each.cell.outcomes if outcome[1] != OK})
    peak = result.copy_bandwidth
    return {
        "s": [each.middle_s for each in bins],
        "rate": [each.compute(lambda cell, seconds: cell.ok / seconds) for each in bins],
        "bandwidth": [each.compute(lambda cell, seconds: cell.moved_bytes / seconds / 1e9) for each in bins],
        "kernels": [
            each.compute(lambda cell, _: compute_rate(cell.kernel_bytes, cell.kernel_s) / 1e9) for each in bins
        ],
        "percentiles": {
            f"p{percent:g}": [each.compute_percentile_ms(percent) for each in bins] for percent in PERCENTILES
        },
        "errors": {
            _format_outcome(outcome): [each.compute_outcome_rate(outcome) for each in bins] for outcome in outcomes
        },
        "phases": [{"name": each.phase.name, "s": each.start_s} for each in result.phases],
        "ceilings": {
            "echo": None if result.echo is None else result.echo.bytes_per_second / 1e9,
            "copy": None if peak is None else peak / 1e9,
        },
    }


@dataclass(frozen=True, slots=True)
class _TimeBin:
    """An interval of the run's time that is one point of the plots over time.

    Attributes:
        middle_s: its middle, in seconds since the first phase began.
        seconds: the part of it within a phase; all of it if responses arrived after a phase.
        cell: the requests that ended in it; None between phases.
    """

    middle_s: float
    seconds: float
    cell: RequestTotals | None

    def compute(self, number: Callable[[RequestTotals, float], float]) -> float | None:
        return None if self.cell is None else _replace_nan(number(self.cell, self.seconds))

    def compute_percentile_ms(self, percent: float) -> float | None:
        return self.compute(lambda cell, _: cell.latency.compute_percentile_s(percent) * 1e3)

    def compute_outcome_rate(self, outcome: tuple[int, str]) -> float | None:
        return self.compute(lambda cell, seconds: cell.outcomes[outcome] / seconds)


def _make_bins(phases: Sequence[PhaseResult]) -> list[_TimeBin]:
    """Divide the run's time into bins of equal width, the points of the plots over time.

    Incomplete bins at the run's end and before pauses are left out.

    Consecutive phases share the bins in which both have responses.
    """
    # A multiple of the interval, so that all bins have the same number of intervals.
    interval_s = max((each.tally.interval_s for each in phases), default=_POINT_S)
    width = interval_s * math.ceil(_POINT_S / interval_s)
    cells: dict[int, RequestTotals] = {}
    covered: Counter[int] = Counter()
    for each in phases:
        for number, cell in each.tally.sum_by_interval().items():
            middle = each.start_s + (number + 0.5) * each.tally.interval_s
            cells.setdefault(int(middle / width), RequestTotals()).merge(cell)
        # In thousandths of a bin.
        first, last = (round(1000 * at / width) for at in (each.start_s, each.start_s + each.phase.duration_s))
        for number in range(first // 1000, -(-last // 1000)):
            covered[number] += min(last, 1000 * (number + 1)) - max(first, 1000 * number)
    # A run shorter than a bin has only one, incomplete bin.
    complete_bins = [number for number, part in covered.items() if part >= _WHOLE]
    last = max(complete_bins or covered, default=-1)
    if complete_bins:
        # A phase ends within these bins; the rate of a short time, with late responses, is not the phase's.
        for number, part in list(covered.items()):
            if part < _WHOLE and not covered[number + 1]:
                covered[number] = 0
                cells.pop(number, None)
    return [_make_bin(number, width, cells.get(number), covered[number]) for number in range(last + 1)]


def _make_bin(number: int, width: float, cell: RequestTotals | None, covered: int) -> _TimeBin:
    """Make a bin of the plots over time.

    A bin without requests is a gap between phases, but within a phase it shows that the server
    stalled.

    Args:
        number: of the bin, from the start of the first phase.
        width: of all bins, in seconds.
        cell: the requests that ended in the bin, if any.
        covered: how much of the bin is within phases, in thousandths.
    """
    # If no request ended within a phase, the server stalled.  A bin at the edge of a phase may just be short.
    inside = covered >= 500
    seconds = width * covered / 1000 if inside else width
    return _TimeBin((number + 0.5) * width, seconds, cell or (RequestTotals() if inside else None))


def _make_percentile_curves(result: RunResult) -> dict[str, Any]:
    """Make the plot of latency by percentile, a curve for each phase.

    x is -log10(1 - p / 100), so that 90, 99 and 99.9 are equally spaced.
    """
    return {
        "nines": [-math.log10(1 - percent / 100) for percent in _CURVE],
        "percents": list(_CURVE),
        "parts": {
            part.name: [_replace_nan(part.total.latency.compute_percentile_s(percent) * 1e3) for percent in _CURVE]
            for part in result.summarise_phases()
        },
    }


def _make_load_curves(result: RunResult) -> dict[str, Any] | None:
    """Make the plot of rate and latencies by offered load; None if the phases are no sweep of loads."""
    sweep = result.find_sweep()
    if sweep is None:
        return None
    parts = sorted(
        (part for part in result.summarise_phases() if not math.isnan(part.offered)), key=lambda part: part.offered
    )
    return {
        "offered": [part.offered for part in parts],
        "rate": [part.rate for part in parts],
        "percentiles": {
            f"p{percent:g}": [
                _replace_nan(part.total.latency.compute_percentile_s(percent) * 1e3) for part in parts
            ]
            for percent in PERCENTILES
        },
        "knee": None if sweep.knee is None else sweep.knee.offered,
        "sustained": None if sweep.sustained is None else sweep.sustained.offered,
    }


def _render_facts(facts: Mapping[str, str]) -> str:
    return "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in facts.items())


def _render_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render an HTML table whose rows begin with a heading; "" if there are no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}" for heading in headings)
    body = "".join(
        f"<tr><th>{escape(first)}" + "".join(f"<td>{escape(cell)}" for cell in cells) for first, *cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}<tbody>{body}</table></div>'


def _format_outcome(outcome: tuple[int, str]) -> str:
    status, code = outcome
    return f"{status} {code}" if status else code


def _replace_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _encode_script_json(data: Any) -> str:
    """Encode JSON that is safe within a script element: it cannot contain an end tag."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
