"""A run on the terminal: a progress bar during the run, tables afterwards."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from normload import load_run
from normload.clients import client_worker
from normload.measurements.objective_outcomes import Outcome
from normload.measurements.results import RunResult
from normload.report import report_tables

# Width for output to a pipe or a file.
_UNATTENDED_WIDTH = 120
# Interval between lines about the progress where there is no terminal.
LINE_S = 10.0


def make_console() -> Console:
    """Make the console that reports are printed to."""
    return Console(width=None if sys.stdout.isatty() else _UNATTENDED_WIDTH, highlight=False)


class ProgressBar(load_run.RunObserver):
    """A progress bar on the terminal, with rates and errors of the current stage."""

    def __init__(self, progress: Progress, on_control: Callable[[Callable[[], None]], None]) -> None:
        self._progress = progress
        self._on_control = on_control
        self._task: TaskID | None = None
        self._duration_s: float | None = None
        self._began = 0.0
        self._requests = self._errors = self._moved = 0

    def begin_stage(self, name: str, duration_s: float | None) -> None:
        """Replace the bar with one for a new stage of the run, whose duration is None if not known."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=duration_s, state="")
        self._duration_s, self._began = duration_s, time.perf_counter()
        self._requests = self._errors = self._moved = 0

    def add_progress(self, progress: client_worker.LoadProgress) -> None:
        """Add requests that have ended to the stage's counts, and update the bar."""
        if self._task is None:
            return
        self._requests += progress.requests
        self._errors += progress.errors
        self._moved += progress.moved_bytes
        elapsed_s = max(time.perf_counter() - self._began, 1e-9)
        rates = f"{self._requests / elapsed_s:.0f}/s  {self._moved / elapsed_s / 1e9:.3f} GB/s"
        done = min(elapsed_s, self._duration_s or elapsed_s)
        self._progress.update(self._task, completed=done, state=f"{rates}  {self._errors} errors")

    def set_stop(self, stop: Callable[[], None]) -> None:
        """Pass on the function that ends the run."""
        self._on_control(stop)


class ProgressLines(load_run.RunObserver):
    """Lines about a run's progress on a pipe or in a file: one for each stage, and one each ten seconds."""

    def __init__(self, on_control: Callable[[Callable[[], None]], None]) -> None:
        self._on_control = on_control
        self._name = ""
        self._duration_s: float | None = None
        self._began = self._last = 0.0
        self._requests = self._errors = 0

    def begin_stage(self, name: str, duration_s: float | None) -> None:
        """Write the name of a new stage, and its duration if it is known."""
        self._name, self._duration_s = name, duration_s
        self._began = self._last = time.perf_counter()
        self._requests = self._errors = 0
        self._write_line("begins" if duration_s is None else f"begins, {_format_seconds(duration_s)} s")

    def add_progress(self, progress: client_worker.LoadProgress) -> None:
        """Add requests that have ended to the stage's counts; write a line if the last one is ten seconds ago."""
        self._requests += progress.requests
        self._errors += progress.errors
        now = time.perf_counter()
        if now - self._last >= LINE_S:
            self._last = now
            of = "" if self._duration_s is None else f" of {_format_seconds(self._duration_s)}"
            rate = self._requests / (now - self._began)
            self._write_line(f"{now - self._began:.0f}{of} s, {rate:.0f}/s, {self._errors} errors")

    def set_stop(self, stop: Callable[[], None]) -> None:
        """Pass on the function that ends the run."""
        self._on_control(stop)

    def _write_line(self, text: str) -> None:
        # Not stdout, which has the results.
        print(f"normload: {self._name}: {text}", file=sys.stderr, flush=True)


def _format_seconds(seconds: float) -> str:
    """Format a duration in whole seconds, and one of less than ten seconds with three digits."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.3g}"


@contextmanager
def show_progress(
    console: Console, on_control: Callable[[Callable[[], None]], None]
) -> Iterator[load_run.RunObserver]:
    """Show the progress while the `with` block runs, as a bar on a terminal and as lines elsewhere; yield the
    observer that updates it.

    Args: on_control: receives the function that ends the run early.
    """
    if not console.is_terminal:
        yield ProgressLines(on_control)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        yield ProgressBar(shown, on_control)


def print_result(console: Console, result: RunResult) -> None:
    """Print a run's tables, bandwidths, errors, wrong responses and remarks."""
    _print_line(console, f"{result.scenario}: {result.description}" if result.description else result.scenario)
    _print_line(console, _format_setup_line(result))
    console.print(_make_table_with_total(report_tables.PART_HEADINGS, report_tables.make_phase_rows(result)))
    console.print(
        _make_table_with_total(report_tables.OPERATION_HEADINGS, report_tables.make_operation_rows(result))
    )
    for sentence in report_tables.list_sentences(result):
        _print_line(console, sentence)
    if errors := report_tables.format_errors(result):
        _print_line(console, f"Errors: {errors}.", "yellow")
    for fault in result.faults:
        _print_line(console, f"Wrong response: {fault}", "red")
    for remark in result.remarks:
        _print_line(console, remark, "yellow")


def print_objectives(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print each objective with its measured value."""
    for text, measured, verdict in report_tables.make_objective_rows(outcomes):
        _print_line(console, f"{text}: {verdict}, {measured}", "green" if verdict == "passed" else "red")


def _format_setup_line(result: RunResult) -> str:
    """Format a line about the server, the client's settings, and the numbers of requests and checks."""
    server_prefix = f"{result.server_name}, " if result.server_name else ""
    found = f", capacity {result.capacity:.0f}/s" if result.capacity else ""
    sent = sum(result.count_sent_by_status().values())
    return (
        f"{server_prefix}at {result.url}; {result.processes} client processes, {result.connections} connections, "
        f"seed {result.seed}{found}; {sent} requests with the warm-up, {result.checked} responses checked, "
        f"{result.wrong} wrong"
    )


def _make_table_with_total(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a terminal table whose last row is the total, in bold."""
    # Narrow enough for 80 columns: the box separates columns with a blank, so they need no padding.
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return table


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False)
