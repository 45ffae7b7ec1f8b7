"""Texts and table cells that all reports of a run share, and a run as Markdown for issues and pull requests."""

import math
from collections.abc import Sequence

from normload.measurements.objective_outcomes import Outcome
from normload.measurements.results import PERCENTILES, PhaseSummary, RunResult
from normload.measurements.tallies import OK, RequestTotals, compute_rate, format_error

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
OBJECTIVE_HEADINGS = ("objective", "measured", "result")

# A server's description of itself may contain markup.
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|&"} | {"\n": " ", "\r": " "})


def make_phase_rows(result: RunResult) -> list[list[str]]:
    """Make a row for each phase, and a last one for the whole run."""
    return [_format_phase_row(part) for part in (*result.summarise_phases(), result.all_phases)]


def make_operation_rows(result: RunResult) -> list[list[str]]:
    """Make a table row for each operation, and a last row of totals."""
    all_phases = result.all_phases
    rows = [
        [name, *_make_total_cells(*all_phases.sum_operation(name), all_phases.duration_s)]
        for name in result.list_operations()
    ]
    return [*rows, ["all", *_make_total_cells(all_phases.total, all_phases.in_time, all_phases.duration_s)]]


def make_objective_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Make a table row for each objective: its text, the measured value, and whether it passed."""
    return [
        [objective.label, objective.format_value(value), "passed" if passed else "failed"]
        for objective, value, passed in outcomes
    ]


def format_statuses(result: RunResult) -> str:
    """Format the counts of all requests by HTTP status, with those of the warm-up."""
    counts = sorted(result.count_sent_by_status().items())
    return ", ".join(f"{status or 'no response'}: {count}" for status, count in counts)


def format_errors(result: RunResult) -> str:
    """Format how often each error occurred in all phases, the most frequent first; "" if there are none."""
    outcomes = result.all_phases.total.outcomes.most_common()
    return ", ".join(f"{format_error(*error)}: {count}" for error, count in outcomes if error[1] != OK)


def list_facts(result: RunResult) -> dict[str, str]:
    """List facts about the run, its client and its server as texts by name; unknown ones are left out."""
    facts = {
        "server": result.server_name or "?",
        "URL": result.url,
        "started": result.started,
        "duration": f"{result.all_phases.duration_s:.1f} s",
        "client": f"{result.processes} processes, {result.connections} connections, seed {result.seed}",
        "client CPU": _format_client_cpu(result),
        "capacity": f"{result.capacity:.0f}/s" if result.capacity else "",
        "by status, with warm-up": format_statuses(result),
        "errors": format_errors(result),
        "responses checked": f"{result.checked}, {result.wrong} wrong",
    }
    return {name: value for name, value in facts.items() if value}


def _format_client_cpu(result: RunResult) -> str:
    """Format the CPU use of the busiest client process and of the client's machine; "" if neither was measured."""
    shares = [f"busiest process {max(result.cpu):.0%} of a core"] if result.cpu else []
    if result.machine is not None:
        shares.append(f"its machine {result.machine.busy:.0%} of {result.machine.cores} cores")
    return ", ".join(shares)


def list_sentences(result: RunResult) -> list[str]:
    """Describe bandwidth relative to its upper bounds, and the results of a sweep."""
    return [*_list_bandwidth_sentences(result), *_list_sweep_sentences(result)]


def _list_bandwidth_sentences(result: RunResult) -> list[str]:
    """Describe the served throughput and the bandwidth of the kernels, as fractions of their upper bounds.

    An unknown one is left out.
    """
    sentences = []
    all_phases, echo = result.all_phases, result.echo
    if echo is not None and all_phases.bytes_per_second > 0:
        reached = max(part.bytes_per_second for part in result.summarise_phases())
        sentences.append(
            f"Served throughput: at most {reached / 1e9:.3f} GB/s, {reached / echo.bytes_per_second:.1%} of the "
            f"loopback echo's {echo.bytes_per_second / 1e9:.2f} GB/s ({echo.pairs} pairs of sockets, messages of "
            f"{_format_bytes(echo.nbytes)}, median round trip {format_milliseconds(echo.p50_s)} ms)."
        )
    kernel = result.compute_kernel_bandwidth()
    if not math.isnan(kernel):
        peak = result.copy_bandwidth
        of_peak = f", {kernel / peak:.1%} of the device's copy bandwidth of {peak / 1e9:.1f} GB/s" if peak else ""
        sentences.append(f"Kernel bandwidth: {kernel / 1e9:.2f} GB/s{of_peak}.")
    return sentences


def _list_sweep_sentences(result: RunResult) -> list[str]:
    """Describe the knee, the sustained load and the peak rate; an empty list if the phases are no sweep
    of loads.
    """
    sweep = result.find_sweep()
    if sweep is None:
        return []
    sentences = []
    if sweep.knee is not None:
        sentences.append(
            f"Knee at {sweep.knee.name}: {sweep.knee.offered:.0f}/s with a mean latency of "
            f"{format_milliseconds(sweep.knee.mean_s)} ms."
        )
    sustained = f"{sweep.sustained.scheduled:.0f}/s" if sweep.sustained else "none of the offered rates"
    return [*sentences, f"Sustained: {sustained}; highest rate of successful requests: {sweep.peak:.0f}/s."]


def _format_phase_row(part: PhaseSummary) -> list[str]:
    """Format the row of one phase, or of all, with the columns `PART_HEADINGS`; a dash is an unknown value."""
    latency = part.total.latency
    return [
        part.name,
        _format_number(part.offered, 1),
        _format_number(part.rate, 1),
        _format_number(part.bytes_per_second / 1e9, 3),
        *(format_milliseconds(latency.compute_percentile_s(percent)) for percent in PERCENTILES),
        format_milliseconds(latency.max_s if latency.count else math.nan),
        str(part.total.errors),
    ]


def _make_total_cells(total: RequestTotals, in_time: RequestTotals, duration_s: float) -> list[str]:
    """Format the cells that follow the name in an operation's row, whose columns are `OPERATION_HEADINGS`.  A dash
    is an unknown value.

    Args:
        total: all requests.
        in_time: those that ended within their phases, from which rates are computed.
    """
    kernel = compute_rate(total.kernel_bytes, total.kernel_s)
    return [
        str(total.requests),
        str(total.errors),
        _format_number(compute_rate(in_time.ok, duration_s), 1),
        _format_number(compute_rate(in_time.moved_bytes, duration_s) / 1e9, 3),
        format_milliseconds(total.latency.compute_percentile_s(50)),
        format_milliseconds(total.latency.compute_percentile_s(99)),
        _format_number(kernel / 1e9, 2),
    ]


def format_milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with two decimals; a dash for NaN."""
    return _format_number(seconds * 1e3, 2)


def _format_number(value: float, digits: int) -> str:
    """Format a number with this many digits after the point; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def make_markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Make the lines of a Markdown table; an empty list if there are no rows."""
    if not rows:
        return []
    lines = [
        headings,
        ["---", *["---:"] * (len(headings) - 1)],
        *([escape_markdown(cell) for cell in row] for row in rows),
    ]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, in one line."""
    return text.translate(_MARKUP)


def escape_formula(name: str) -> str:
    """Escape text so that a spreadsheet does not take it for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def render_markdown(result: RunResult, outcomes: Sequence[Outcome] = ()) -> str:
    """Render the results of a run as Markdown, to paste into an issue or a pull request.

    Args: outcomes: the run's objectives with their results.
    """
    title = f"{result.scenario}: {result.description}" if result.description else result.scenario
    facts = [f"- {name}: {escape_markdown(value)}" for name, value in list_facts(result).items()]
    remarks = [f"- {escape_markdown(text)}" for text in (*list_sentences(result), *result.faults, *result.remarks)]
    blocks = [
        [f"**normload {escape_markdown(title)}**"],
        facts,
        make_markdown_table(OBJECTIVE_HEADINGS, make_objective_rows(outcomes)),
        make_markdown_table(PART_HEADINGS, make_phase_rows(result)),
        make_markdown_table(OPERATION_HEADINGS, make_operation_rows(result)),
        remarks,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
