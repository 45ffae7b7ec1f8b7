"""A comparison of runs: on the terminal, as Markdown and as CSV."""

import csv
import io
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from normload.report.comparison import ERRORS, MetricComparison
from normload.report.report_tables import escape_formula, escape_markdown, make_markdown_table

HEADINGS = ("phase", "metric", "before", "after", "change", "interval")
SPREAD_HEADINGS = ("spread before", "spread after")

COLUMNS = (
    *("phase", "metric", "before", "after", "interval_low", "interval_high"),
    *("spread_before", "spread_after", "result"),
)


def print_significant_changes(
    console: Console, comparisons: Sequence[MetricComparison], remarks: Sequence[str] = ()
) -> None:
    """Print a table of the changes beyond noise, or that there are none, and then the remarks."""
    changed = [change for change in comparisons if change.is_change]
    if changed:
        first, second, *others = _list_headings(changed)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
        for heading in (first, second):
            table.add_column(heading, no_wrap=True)
        for heading in others:
            table.add_column(heading, justify="right", no_wrap=True)
        for change in changed:
            table.add_row(*_format_row(change), style="red" if change.is_worse else "green")
        console.print(table)
    else:
        console.print(_format_no_change(comparisons))
    for remark in remarks:
        console.print(remark, style="yellow", markup=False)


def render_markdown(title: str, comparisons: Sequence[MetricComparison], remarks: Sequence[str] = ()) -> str:
    """Render the changes beyond noise as Markdown, to paste into an issue or a pull request."""
    changed = [change for change in comparisons if change.is_change]
    rows = [[*_format_row(change), "worse" if change.is_worse else "better"] for change in changed]
    blocks = [
        [f"**normload compare: {escape_markdown(title)}**"],
        make_markdown_table((*_list_headings(changed), "result"), rows)
        if rows
        else [_format_no_change(comparisons)],
        [f"- {escape_markdown(remark)}" for remark in remarks],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def render_csv(comparisons: Sequence[MetricComparison]) -> str:
    """Render CSV with a line for every metric of every phase, changed or not.

    Rates are in requests or bytes per second, latencies in seconds, errors a fraction.  The interval is that of
    after/before, for errors of after - before.  A spread is a standard deviation between runs, relative to their
    mean except for errors, and empty for a single run.  `result` is better, worse or same.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for each in comparisons:
        numbers = (each.before, each.after, each.low, each.high, each.spread_before, each.spread_after)
        result = "same" if not each.is_change else "worse" if each.is_worse else "better"
        shown = ("" if math.isnan(number) else f"{number:.6g}" for number in numbers)
        lines.writerow([escape_formula(each.phase), each.metric, *shown, result])
    return text.getvalue()


def _format_no_change(changes: Sequence[MetricComparison]) -> str:
    return f"No change beyond noise: {len(changes)} values compared."


def _list_headings(changed: Sequence[MetricComparison]) -> tuple[str, ...]:
    return HEADINGS + SPREAD_HEADINGS if any(map(_has_spread, changed)) else HEADINGS


def _format_row(change: MetricComparison) -> list[str]:
    """Format the cells of a change for a table: values, difference and interval, and the spreads if known."""
    if change.metric == ERRORS:
        how_much = f"{change.after - change.before:+.2%}", f"{change.low:+.2%} to {change.high:+.2%}"
    else:
        by = change.after / change.before - 1
        how_much = f"{by:+.1%}", f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"
    spreads = [_format_percent(each) for each in (change.spread_before, change.spread_after)]
    return [
        *(
            change.phase,
            change.metric,
            change.format_value(change.before),
            change.format_value(change.after),
            *how_much,
        ),
        *(spreads if _has_spread(change) else []),
    ]


def _has_spread(change: MetricComparison) -> bool:
    return not (math.isnan(change.spread_before) and math.isnan(change.spread_after))


def _format_percent(spread: float) -> str:
    return "-" if math.isnan(spread) else f"{spread:.1%}"
