"""A run in cells of text: what every report has, whatever it is written in."""

import math
from collections.abc import Sequence

from normload.measurements.result import PERCENTILES, Part, Result
from normload.measurements.slo import Objective
from normload.measurements.tally import OK, Cell, per_second

PART_HEADINGS = (
    "phase",
    "offered/s",
    "ok/s",
    "GB/s",
    *(f"p{percent:g} ms" for percent in PERCENTILES),
    "max ms",
    "errors",
)
OPERATION_HEADINGS = ("operation", "requests", "errors", "ok/s", "GB/s", "p50 ms", "p99 ms", "kernel GB/s")
OBJECTIVE_HEADINGS = ("objective", "reached", "")

Outcome = tuple[Objective, float, bool]
"""An objective, its value in a run, and whether that meets it."""


def parts(result: Result) -> list[list[str]]:
    """A row for each phase, and the last one for all together."""
    return [_part(part) for part in (*result.parts(), result.whole)]


def operations(result: Result) -> list[list[str]]:
    """A row for each operation, and the last one for all together."""
    whole = result.whole
    rows = [[name, *_cells(*whole.of(name), whole.duration_s)] for name in result.operations()]
    return [*rows, ["all", *_cells(whole.total, whole.in_time, whole.duration_s)]]


def objectives(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for each objective."""
    return [
        [objective.text, objective.show(value), "met" if met else "missed"] for objective, value, met in outcomes
    ]


def statuses(result: Result) -> str:
    """How many of all requests, warm-up included, were answered with which status."""
    counts = sorted(result.sent_by_status().items())
    return ", ".join(f"{status or 'no answer'}: {count}" for status, count in counts)


def errors(result: Result) -> str:
    """The errors of the phases by code, the most frequent first; "" of none."""
    outcomes = result.whole.total.outcomes.most_common()
    failed = [(f"{status} {code}" if status else code, count) for (status, code), count in outcomes if code != OK]
    return ", ".join(f"{what}: {count}" for what, count in failed)


def facts(result: Result) -> dict[str, str]:
    """What was asked, and by whom."""
    known = {
        "server": result.server_name or "?",
        "at": result.url,
        "started": result.started,
        "duration": f"{result.whole.duration_s:.1f} s",
        "client": f"{result.processes} processes, {result.connections} connections, seed {result.seed}",
        "capacity": f"{result.capacity:.0f}/s" if result.capacity else "",
        "sent, with the warm-up": statuses(result),
        "errors": errors(result),
        "answers checked": f"{result.checked}, {result.wrong} wrong",
    }
    return {name: value for name, value in known.items() if value}


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


def _part(part: Part) -> list[str]:
    offered = "-" if math.isnan(part.offered) else f"{part.offered:.1f}"
    latency = part.total.latency
    return [
        part.name,
        offered,
        f"{part.rate:.1f}",
        f"{part.bytes_per_second / 1e9:.3f}",
        *(milliseconds(latency.percentile(percent)) for percent in PERCENTILES),
        milliseconds(latency.max_s if latency.count else math.nan),
        str(part.total.errors),
    ]


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


def milliseconds(seconds: float) -> str:
    """Two digits behind the point; a dash for NaN."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
