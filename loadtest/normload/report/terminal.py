"""A run on the terminal: a bar while it lasts, tables when it is over."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from normload import run
from normload.clients import worker
from normload.measurements.result import PERCENTILES, Part, Result
from normload.measurements.slo import Objective
from normload.measurements.tally import OK, Cell, per_second

PART_HEADINGS = ("offered/s", "ok/s", "GB/s", *(f"p{percent:g} ms" for percent in PERCENTILES), "max ms", "errors")

# In a pipe or a log there is no window to fit.
_UNATTENDED_WIDTH = 120


def console() -> Console:
    """Where reports go."""
    return Console(width=None if sys.stdout.isatty() else _UNATTENDED_WIDTH, highlight=False)


class Bar(run.Watcher):
    """Shows how a run goes."""

    def __init__(self, progress: Progress, on_control: Callable[[Callable[[], None]], None]) -> None:
        self._progress = progress
        self._on_control = on_control
        self._task: TaskID | None = None
        self._duration_s: float | None = None
        self._began = 0.0
        self._requests = self._errors = self._moved = 0

    def stage(self, name: str, duration_s: float | None) -> None:
        """A stage begins."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=duration_s, state="")
        self._duration_s, self._began = duration_s, time.perf_counter()
        self._requests = self._errors = self._moved = 0

    def progress(self, progress: worker.Progress) -> None:
        """Requests have ended."""
        if self._task is None:
            return
        self._requests += progress.requests
        self._errors += progress.errors
        self._moved += progress.moved_bytes
        elapsed_s = max(time.perf_counter() - self._began, 1e-9)
        rates = f"{self._requests / elapsed_s:.0f}/s  {self._moved / elapsed_s / 1e9:.3f} GB/s"
        done = min(elapsed_s, self._duration_s or elapsed_s)
        self._progress.update(self._task, completed=done, state=f"{rates}  {self._errors} errors")

    def control(self, stop: Callable[[], None]) -> None:
        """Pass on how to end the run."""
        self._on_control(stop)


@contextmanager
def progress(console: Console, on_control: Callable[[Callable[[], None]], None]) -> Iterator[run.Watcher]:
    """Show a bar while the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        yield Bar(shown, on_control)


def show(console: Console, result: Result) -> None:
    """Print what came of a run."""
    _say(console, f"{result.scenario}: {result.description}" if result.description else result.scenario)
    _say(console, _server(result))
    console.print(_phases(result))
    console.print(_operations(result))
    for sentence in sentences(result):
        _say(console, sentence)
    errors = {
        f"{status} {code}" if status else code: count
        for (status, code), count in result.whole.total.outcomes.most_common()
        if code != OK
    }
    if errors:
        counts = ", ".join(f"{code}: {count}" for code, count in errors.items())
        _say(console, f"Errors: {counts}.", "yellow")
    for fault in result.faults:
        _say(console, f"Wrong answer: {fault}", "red")
    for remark in result.remarks:
        _say(console, remark, "yellow")


def show_objectives(console: Console, outcomes: Sequence[tuple[Objective, float, bool]]) -> None:
    """Print what was promised and what was kept."""
    for objective, value, met in outcomes:
        verdict = "met" if met else "missed"
        _say(console, f"{objective.text}: {verdict}, {objective.show(value)}", "green" if met else "red")


def sentences(result: Result) -> list[str]:
    """What was reached of what can be, and where latency bends."""
    return [*_ceilings(result), *_knee(result)]


def _ceilings(result: Result) -> list[str]:
    sentences = []
    whole, echo = result.whole, result.echo
    if echo is not None and whole.bytes_per_second > 0:
        reached = max(part.bytes_per_second for part in result.parts())
        sentences.append(
            f"End to end {reached / 1e9:.3f} GB/s at most: {reached / echo.bytes_per_second:.1%} of the loopback "
            f"echo, {echo.bytes_per_second / 1e9:.2f} GB/s with {echo.pairs} pairs of sockets and messages of "
            f"{_size(echo.nbytes)}; a round trip of it takes {milliseconds(echo.p50_s)} ms."
        )
    kernel = result.kernel_bandwidth()
    if not math.isnan(kernel):
        roof = result.copy_bandwidth
        of_roof = f", {kernel / roof:.1%} of the device's copy, {roof / 1e9:.1f} GB/s" if roof else ""
        sentences.append(f"Kernels {kernel / 1e9:.2f} GB/s{of_roof}.")
    return sentences


def _knee(result: Result) -> list[str]:
    found = result.knee()
    if found is None:
        return []
    kept = f"up to {found.sustained.offered:.0f}/s as fast as they came, " if found.sustained else ""
    return [
        f"Knee at {found.knee.name}: {found.knee.offered:.0f}/s, {found.knee.mean_s * 1e3:.2f} ms on average; "
        f"answered {kept}{found.peak:.0f}/s at most."
    ]


def _server(result: Result) -> str:
    known = f"{result.server_name}, " if result.server_name else ""
    found = f", capacity {result.capacity:.0f}/s" if result.capacity else ""
    sent = sum(result.sent_by_status().values())
    return (
        f"{known}at {result.url}; {result.processes} client processes, {result.connections} connections, "
        f"seed {result.seed}{found}; {sent} requests with the warm-up, {result.checked} answers checked, "
        f"{result.wrong} wrong"
    )


def _phases(result: Result) -> Table:
    table = _table("phase", *PART_HEADINGS)
    for part in result.parts():
        table.add_row(part.name, *part_cells(part))
    table.add_section()
    table.add_row("all", *part_cells(result.whole), style="bold")
    return table


def part_cells(part: Part) -> list[str]:
    """What stands below `PART_HEADINGS`."""
    offered = "-" if math.isnan(part.offered) else f"{part.offered:.1f}"
    latency = part.total.latency
    return [
        offered,
        f"{part.rate:.1f}",
        f"{part.bytes_per_second / 1e9:.3f}",
        *(milliseconds(latency.percentile(percent)) for percent in PERCENTILES),
        milliseconds(latency.max_s if latency.count else math.nan),
        str(part.total.errors),
    ]


def _operations(result: Result) -> Table:
    table = _table("operation", "requests", "errors", "ok/s", "GB/s", "p50 ms", "p99 ms", "kernel GB/s")
    whole = result.whole
    for operation in result.operations():
        table.add_row(operation, *_cells(*whole.of(operation), whole.duration_s))
    table.add_section()
    table.add_row("all", *_cells(whole.total, whole.in_time, whole.duration_s), style="bold")
    return table


def _cells(total: Cell, in_time: Cell, duration_s: float) -> list[str]:
    kernel = per_second(total.kernel_bytes, total.kernel_s)
    return [
        str(total.requests),
        str(total.errors),
        f"{in_time.ok / duration_s:.1f}" if duration_s else "-",
        f"{in_time.moved_bytes / duration_s / 1e9:.3f}" if duration_s else "-",
        milliseconds(total.latency.percentile(50)),
        milliseconds(total.latency.percentile(99)),
        "-" if math.isnan(kernel) else f"{kernel / 1e9:.2f}",
    ]


def _table(first: str, *headings: str) -> Table:
    # Narrow enough for 80 columns: the box brings a blank between the columns, so they need no padding.
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False)


def milliseconds(seconds: float) -> str:
    """Two digits behind the point; a dash for NaN."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
