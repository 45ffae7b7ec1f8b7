"""A comparison of runs: on the terminal, as Markdown and as CSV."""

import csv
import io
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from normload.report.compare import ERRORS, Change
from normload.report.tables import markdown_table, plain, spreadsheet_text

HEADINGS = ("phase", "metric", "before", "after", "change", "interval")
SPREAD_HEADINGS = ("spread before", "spread after")

COLUMNS = (
    *("phase", "metric", "before", "after", "interval_low", "interval_high"),
    *("spread_before", "spread_after", "result"),
)


def show(console: Console, changes: Sequence[Change], remarks: Sequence[str] = ()) -> None:
    """Print the changes beyond noise, or that there are none."""
    changed = [change for change in changes if change.is_change]
    if changed:
        first, second, *others = _headings(changed)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
        for heading in (first, second):
            table.add_column(heading, no_wrap=True)
        for heading in others:
            table.add_column(heading, justify="right", no_wrap=True)
        for change in changed:
            table.add_row(*_row(change), style="red" if change.is_worse else "green")
        console.print(table)
    else:
        console.print(_unchanged(changes))
    for remark in remarks:
        console.print(remark, style="yellow", markup=False)


def markdown(title: str, changes: Sequence[Change], remarks: Sequence[str] = ()) -> str:
    """Return a summary of the changes beyond noise, to paste into an issue or a pull request."""
    changed = [change for change in changes if change.is_change]
    rows = [[*_row(change), "worse" if change.is_worse else "better"] for change in changed]
    blocks = [
        [f"**normload compare: {plain(title)}**"],
        markdown_table((*_headings(changed), "result"), rows) if rows else [_unchanged(changes)],
        [f"- {plain(remark)}" for remark in remarks],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def spreadsheet(changes: Sequence[Change]) -> str:
    """Return CSV with a line for every metric of every phase, changed or not.

    Rates are in requests or bytes per second, latencies in seconds, errors a fraction.  The interval is that of
    after/before, for errors of after - before.  A spread is a standard deviation between runs, relative to their
    mean except for errors, and empty for a single run.  `result` is better, worse or same.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for each in changes:
        numbers = (each.before, each.after, each.low, each.high, each.spread_before, each.spread_after)
        result = "same" if not each.is_change else "worse" if each.is_worse else "better"
        shown = ("" if math.isnan(number) else f"{number:.6g}" for number in numbers)
        lines.writerow([spreadsheet_text(each.phase), each.metric, *shown, result])
    return text.getvalue()


def _unchanged(changes: Sequence[Change]) -> str:
    return f"No change beyond noise: {len(changes)} values compared."


def _headings(changed: Sequence[Change]) -> tuple[str, ...]:
    return HEADINGS + SPREAD_HEADINGS if any(map(_has_spread, changed)) else HEADINGS


def _row(change: Change) -> list[str]:
    if change.metric == ERRORS:
        how_much = f"{change.after - change.before:+.2%}", f"{change.low:+.2%} to {change.high:+.2%}"
    else:
        by = change.after / change.before - 1
        how_much = f"{by:+.1%}", f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"
    spreads = [_percent(each) for each in (change.spread_before, change.spread_after)]
    return [
        *(change.phase, change.metric, change.shown(change.before), change.shown(change.after), *how_much),
        *(spreads if _has_spread(change) else []),
    ]


def _has_spread(change: Change) -> bool:
    return not (math.isnan(change.spread_before) and math.isnan(change.spread_after))


def _percent(spread: float) -> str:
    return "-" if math.isnan(spread) else f"{spread:.1%}"
