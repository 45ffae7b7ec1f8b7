"""A run as a reader sees it: a bar while it lasts, a table when it is over."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from normload.records import Record, Summary, summarise
from normload.runner import Run

_FAULTS_SHOWN = 5


# In a pipe or a log there is no window to fit.
_UNATTENDED_WIDTH = 120


def terminal() -> Console:
    """Where reports go."""
    return Console(width=None if sys.stdout.isatty() else _UNATTENDED_WIDTH)


def show_server(console: Console, url: str, info: Mapping[str, Any]) -> None:
    """Say what is about to be loaded."""
    device = info.get("device", {})
    console.print(
        f"normserve {info.get('version', '?')} at {url}: backend {info.get('backend', '?')}"
        f" on {device.get('name', '?')}",
        markup=False,
        highlight=False,
    )


@contextmanager
def progress(
    console: Console, *, requests: int | None, duration_s: float | None
) -> Iterator[Callable[[Record], None]]:
    """Show a bar while the block runs; what is yielded wants to hear of every request."""
    columns = (TextColumn("load"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    total = float(requests) if requests is not None else duration_s
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("load", total=total, state="waiting for the first answer")
        began = time.perf_counter()
        count = errors = moved = 0

        def note(record: Record) -> None:
            nonlocal count, errors, moved
            count += 1
            errors += record.code != "ok"
            moved += record.sent_bytes + record.received_bytes
            elapsed_s = max(time.perf_counter() - began, 1e-9)
            done = float(count) if requests is not None else min(elapsed_s, duration_s or elapsed_s)
            rates = f"{count / elapsed_s:.0f}/s  {moved / elapsed_s / 1e9:.3f} GB/s"
            state = f"{count} requests  {rates}  {errors} errors"
            bar.update(task, completed=done, state=state)

        yield note


def show_run(console: Console, run: Run) -> None:
    """Print the table, one line an operation, then the errors by code and what was wrong."""
    title = f"{len(run.records)} requests in {run.elapsed_s:.2f} s"
    # Narrow enough for 80 columns: the box brings a blank between the columns, so they need no padding.
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("operation", no_wrap=True)
    for heading in ("requests", "errors", "req/s", "GB/s", "p50 ms", "p99 ms", "checked", "wrong"):
        table.add_column(heading, justify="right", no_wrap=True)
    for operation in sorted({record.operation for record in run.records}):
        records = [record for record in run.records if record.operation == operation]
        table.add_row(operation, *_cells(summarise(records, run.elapsed_s)))
    table.add_section()
    summary = summarise(run.records, run.elapsed_s)
    table.add_row("all", *_cells(summary), style="bold")
    console.print(table)
    if summary.errors:
        counts = ", ".join(f"{code} {count}" for code, count in summary.errors.most_common())
        console.print(f"errors by code: {counts}", style="yellow", markup=False)
    faults = [f"{record.operation}: {record.fault}" for record in run.records if record.fault]
    for fault in faults[:_FAULTS_SHOWN]:
        console.print(f"wrong answer: {fault}", style="red", markup=False)


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        str(summary.requests),
        str(summary.errors.total()),
        f"{summary.rate:.1f}",
        f"{summary.bytes_per_second / 1e9:.3f}",
        _milliseconds(summary.p50_s),
        _milliseconds(summary.p99_s),
        str(summary.checked),
        str(summary.wrong),
    )


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"
