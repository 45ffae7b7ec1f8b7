"""A run as one HTML file: what the terminal says, and plots; nothing is loaded from anywhere."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from normload import report
from normload.result import PERCENTILES, Part, PhaseResult, Result
from normload.tally import OK, Cell, bandwidth

# Points of a plot over time are at least so far apart.
_POINT_S = 0.25
_CURVE = (0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9)


def render(result: Result) -> str:
    """Return the page."""
    assets = resources.files("normload") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text("utf-8")

    return Template(asset("page.html")).substitute(
        title=escape(f"normload: {result.scenario}"),
        style=asset("uPlot.min.css") + asset("page.css"),
        script=asset("uPlot.iife.min.js") + asset("page.js"),
        description=escape(result.description),
        facts=_rows(_facts(result)),
        sentences="".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences(result)),
        remarks="".join(f"<p>{escape(remark)}</p>" for remark in (*result.faults, *result.remarks)),
        phases=_phases(result),
        data=_embedded(plots(result)),
    )


def plots(result: Result) -> dict[str, Any]:
    """The numbers that are plotted, as uPlot takes them: columns, the first of them x; None is a gap."""
    return {"time": _over_time(result), "latency": _curves(result), "load": _against_load(result)}


def _over_time(result: Result) -> dict[str, Any]:
    points = [point for phase in result.phases for point in _points(phase)]
    roof = result.server.get("copy_bandwidth_bytes_per_second")
    codes = sorted({outcome for _, _, cell in points for outcome in cell.outcomes if outcome[1] != OK})
    return {
        "s": [start for start, _, _ in points],
        "rate": [cell.ok / width for _, width, cell in points],
        "bandwidth": [cell.moved_bytes / width / 1e9 for _, width, cell in points],
        "kernels": [_known(bandwidth(cell.kernel_bytes, cell.kernel_s) / 1e9) for _, _, cell in points],
        "percentiles": {
            f"p{percent:g}": [_known(cell.latency.percentile(percent) * 1e3) for _, _, cell in points]
            for percent in PERCENTILES
        },
        "errors": {
            _outcome(outcome): [cell.outcomes[outcome] / width for _, width, cell in points] for outcome in codes
        },
        "phases": [{"name": each.phase.name, "s": each.start_s} for each in result.phases],
        "ceilings": {
            "echo": None if result.echo is None else result.echo.bytes_per_second / 1e9,
            "copy": None if roof is None else roof / 1e9,
        },
    }


def _points(phase: PhaseResult) -> list[tuple[float, float, Cell]]:
    """Middle and width in seconds, and what ended there."""
    interval_s = phase.tally.interval_s
    together = max(1, math.ceil(_POINT_S / interval_s))
    cells: dict[int, Cell] = {}
    for number, cell in phase.tally.intervals().items():
        cells.setdefault(number // together, Cell()).merge(cell)
    width = together * interval_s
    # An interval in which nothing ended is a point, too: a server that stalled.
    return [
        (phase.start_s + (number + 0.5) * width, width, cells.get(number, Cell()))
        for number in range(max(cells, default=-1) + 1)
    ]


def _curves(result: Result) -> dict[str, Any]:
    """Latency by percentile of each phase; x counts nines, so that 99.9 is as far from 99 as that from 90."""
    return {
        "nines": [-math.log10(1 - percent / 100) for percent in _CURVE],
        "percents": list(_CURVE),
        "parts": {
            part.name: [_known(part.total.latency.percentile(percent) * 1e3) for percent in _CURVE]
            for part in result.parts()
        },
    }


def _against_load(result: Result) -> dict[str, Any] | None:
    found = result.knee()
    if found is None:
        return None
    parts = sorted((part for part in result.parts() if not math.isnan(part.offered)), key=lambda part: part.offered)
    return {
        "offered": [part.offered for part in parts],
        "rate": [part.rate for part in parts],
        "percentiles": {
            f"p{percent:g}": [_known(part.total.latency.percentile(percent) * 1e3) for part in parts]
            for percent in PERCENTILES
        },
        "knee": found.knee.offered,
        "sustained": None if found.sustained is None else found.sustained.offered,
    }


def _facts(result: Result) -> Mapping[str, str]:
    info = result.server
    device = (info.get("device") or {}).get("name", "")
    server = f"normserve {info.get('version', '?')}, {info.get('backend', '?')} on {device}" if info else "?"
    return {
        "server": server,
        "at": result.url,
        "started": result.started,
        "client": f"{result.processes} processes, {result.connections} connections, seed {result.seed}",
        "answers checked": f"{result.checked}, {result.wrong} wrong",
    }


def _rows(facts: Mapping[str, str]) -> str:
    return "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in facts.items())


def _phases(result: Result) -> str:
    headings = ("phase", *report.PART_HEADINGS)
    head = "".join(f"<th>{escape(heading)}" for heading in headings)
    return f"<thead><tr>{head}<tbody>" + "".join(map(_phase, [*result.parts(), result.whole]))


def _phase(part: Part) -> str:
    cells: Sequence[str] = report.part_cells(part)
    return f"<tr><th>{escape(part.name)}" + "".join(f"<td>{escape(cell)}" for cell in cells)


def _outcome(outcome: tuple[int, str]) -> str:
    status, code = outcome
    return f"{status} {code}" if status else code


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end that."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
