"""A run as CSV: a line for each phase and operation, in base units."""

import csv
import io
import math

from normload.measurements.results import PERCENTILES, PhaseSummary, RunResult
from normload.measurements.tallies import RequestTotals, compute_rate
from normload.report.report_tables import escape_formula

COLUMNS = (
    "scenario",
    "started",
    "phase",
    "operation",
    "duration_s",
    "offered_per_second",
    "requests",
    "errors",
    "ok_per_second",
    "bytes_per_second",
    *(f"p{percent:g}_s" for percent in PERCENTILES),
    "max_s",
    "kernel_bytes_per_second",
)


def render_csv(result: RunResult) -> str:
    """Render a run as CSV, with a line for each phase and operation.

    The phase or operation "all" is the total, and an unknown value is empty.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for part in (*result.summarise_phases(), result.all_phases):
        for operation in result.list_operations():
            lines.writerow(_make_line(result, part, operation, math.nan, *part.sum_operation(operation)))
        lines.writerow(_make_line(result, part, "all", part.offered, part.total, part.in_time))
    return text.getvalue()


def _make_line(
    result: RunResult,
    part: PhaseSummary,
    operation: str,
    offered: float,
    total: RequestTotals,
    in_time: RequestTotals,
) -> list[str | float]:
    """Make the cells of a line, in the order of `COLUMNS`; NaN becomes an empty cell.

    Args:
        total: all requests of the phase and operation.
        in_time: those that ended within the phase, from which rates are computed.
    """
    latency = total.latency
    numbers = (
        part.duration_s,
        offered,
        total.requests,
        total.errors,
        compute_rate(in_time.ok, part.duration_s),
        compute_rate(in_time.moved_bytes, part.duration_s),
        *(latency.compute_percentile_s(percent) for percent in PERCENTILES),
        latency.max_s if latency.count else math.nan,
        compute_rate(total.kernel_bytes, total.kernel_s),
    )
    named = (escape_formula(each) for each in (result.scenario, result.started, part.name, operation))
    return [*named, *("" if math.isnan(number) else f"{number:.6g}" for number in numbers)]
