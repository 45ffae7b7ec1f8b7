"""The command line: `normload run`, `normload compare`, `normload scenarios`."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from normserve import __version__
from normserve.client import DEFAULT_URL, ClientError
from normserve.client.deadlines import check_timeout
from normserve.client.http.server_address import ServerAddress

from normload.adapters.registry import ADAPTERS
from normload.clients.client_processes import ClientProcessError
from normload.load import scenarios
from normload.load.objectives import LoadObjective, parse_objective
from normload.load_run import SAMPLE, TargetServer, run_scenario
from normload.measurements.objective_outcomes import Outcome, evaluate_objective
from normload.measurements.results import RunResult, read_result
from normload.report import comparison, comparison_report, csv_report, html_report, report_tables, terminal_report

WRONG_ANSWERS, NO_ANSWERS, MISSED, INTERRUPTED = 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `normload` with these arguments, by default the process's, and return the exit code.

    Raises:
        SystemExit: an argument, a scenario or a file is not valid.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ClientError, ClientProcessError) as error:
        print(f"normload: {error}", file=sys.stderr)
        return NO_ANSWERS
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return code


def _run_scenario(options: argparse.Namespace) -> int:
    """Execute `normload run`: send the load, print the results and write the requested reports.  Return
    the exit code.
    """
    chosen = scenarios.load_scenario(options.scenario)
    if options.duration is not None:
        chosen = chosen.with_duration(options.duration)
    target = TargetServer(options.url, options.adapter, options.api_key, options.timeout)
    files = (options.json, options.html, options.csv, options.markdown)
    for file in files:
        if file is not None:
            _prepare_report_file(file)
    console = terminal_report.make_console()
    with terminal_report.show_progress(console, _stop_at_interrupt) as watcher:
        result = run_scenario(
            chosen,
            target,
            seed=options.seed,
            processes=options.processes,
            verify=options.verify,
            watcher=watcher,
        )
    terminal_report.print_result(console, result)
    outcomes = [evaluate_objective(objective, result) for objective in (*chosen.objectives, *options.slo)]
    terminal_report.print_objectives(console, outcomes)
    if options.json is not None:
        result.write_json(options.json)
    if options.html is not None:
        options.html.write_text(html_report.render_html(result, outcomes), encoding="utf-8")
    if options.csv is not None:
        options.csv.write_text(csv_report.render_csv(result), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(report_tables.render_markdown(result, outcomes), encoding="utf-8")
    if written := [str(file) for file in files if file is not None]:
        console.print(f"Wrote {', '.join(written)}.", markup=False)
    return _choose_exit_code(result, outcomes)


def _choose_exit_code(result: RunResult, outcomes: Sequence[Outcome]) -> int:
    """Choose the exit code of `normload run`, 0 if nothing failed.  The gravest failure decides: a wrong response,
    then no successful request, then a missed objective.
    """
    if result.wrong:
        return WRONG_ANSWERS
    if not result.all_phases.total.ok:
        return NO_ANSWERS
    return 0 if all(passed for _, _, passed in outcomes) else MISSED


def _stop_at_interrupt(stop: Callable[[], None]) -> None:
    """Install a handler for Ctrl-C.  The first Ctrl-C calls `stop`, which ends the run with the results so far; the
    second ends the program.
    """

    def handle_interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, handle_interrupt)


def _compare_runs(options: argparse.Namespace) -> int:
    """Execute `normload compare`: print the changes and write the requested files.  Return the exit
    code, which shows whether a metric is worse.
    """
    before, after = _read_runs(options.before), _read_runs(options.after)
    found, remarks = comparison.compare_runs(before, after), comparison.describe_load_differences(before, after)
    comparison_report.print_significant_changes(terminal_report.make_console(), found, remarks)
    if options.csv is not None:
        _write_file(options.csv, comparison_report.render_csv(found))
    if options.markdown is not None:
        title = f"{before[0].scenario}, {_format_run_count(before)} before and {_format_run_count(after)} after"
        _write_file(options.markdown, comparison_report.render_markdown(title, found, remarks))
    return MISSED if any(change.is_worse for change in found) else 0


def _format_run_count(side: Sequence[RunResult]) -> str:
    return f"{len(side)} run{'s' * (len(side) > 1)}"


def _prepare_report_file(file: Path) -> None:
    """Make a report's folder, and check that the report can be written there, before a run that may take hours.

    Raises:
        OSError: it cannot.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def _write_file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _read_runs(runs: Path) -> list[RunResult]:
    """Read one run's result from a JSON file, or those of all JSON files in a folder.

    Raises:
        ValueError: a file contains no result, or the folder contains no JSON file.
    """
    if not runs.is_dir():
        return [read_result(runs)]
    files = sorted(runs.glob("*.json"))
    if not files:
        raise ValueError(f"there must be a run's JSON in {runs}")
    return [read_result(file) for file in files]


def _print_scenarios(_options: argparse.Namespace) -> int:
    """Execute `normload scenarios`: print the name, duration and description of each built-in scenario."""
    console = terminal_report.make_console()
    for name, description, duration_s in scenarios.list_descriptions(scenarios.load_built_in_scenarios()):
        console.print(f"{name:<10} {duration_s:>5.0f} s  {description}", markup=False)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line.

    `command` in the parsed options is the function that executes the chosen command and returns its
    exit code.
    """
    parser = argparse.ArgumentParser(prog="normload", description="Load tests for normserve and similar servers.")
    parser.add_argument("--version", action="version", version=f"normload {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run_command(commands)
    comparison = commands.add_parser(
        "compare",
        help="show what changed between runs beyond noise",
        description="Compare runs of a scenario and show the changes beyond noise. With several runs a side, in"
        " folders, the spread between runs is measured, and smaller changes are found.",
        epilog=f"Exit code: 0; {MISSED} if a metric is worse.",
    )
    comparison.add_argument("before", type=Path, metavar="BEFORE", help="a run's JSON, or a folder of several")
    comparison.add_argument("after", type=Path, metavar="AFTER", help="the same")
    comparison.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each metric of each phase")
    comparison.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary to paste")
    comparison.set_defaults(command=_compare_runs)
    listing = commands.add_parser("scenarios", help="list the built-in scenarios")
    listing.set_defaults(command=_print_scenarios)
    return parser


def _add_run_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `normload run` and its options to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="run a scenario against a server",
        description="Send seeded requests on a schedule or in a closed loop, and report rates, latencies and"
        " errors, and whether the responses were correct.",
        epilog=f"Exit code: 0; {WRONG_ANSWERS} if a response was wrong; {NO_ANSWERS} if no request succeeded;"
        f" {MISSED} if an objective failed.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("scenario", nargs="?", default="steady", help="a name, see `normload scenarios`, or a file (%(default)s)")
    add("--url", type=_parse_url, default=DEFAULT_URL, help="the server (%(default)s)")
    add("--adapter", choices=list(ADAPTERS), default="normserve", help="its protocol (%(default)s)")
    add(
        "--duration",
        type=_parse_positive,
        metavar="S",
        help="total duration of all phases, in place of the scenario's",
    )
    add(
        "--seed",
        type=_parse_seed,
        default=0,
        metavar="N",
        help="seed of requests, their order and their times (%(default)s)",
    )
    add("--processes", type=_parse_count, metavar="N", help="client processes (half of the cores, 2 to 8)")
    add("--verify", action="store_true", help=f"check every response, not one in {round(1 / SAMPLE)}")
    add(
        "--slo",
        type=_parse_objective,
        action="append",
        default=[],
        metavar="BOUND",
        help="an objective such as p99<20ms or errors<0.1%% over the whole run, beside those of the scenario",
    )
    add("--json", type=Path, metavar="FILE", help="write the result, for `normload compare`")
    add("--html", type=Path, metavar="FILE", help="write an HTML report with plots")
    add("--csv", type=Path, metavar="FILE", help="write a line for each phase and operation")
    add("--markdown", type=Path, metavar="FILE", help="write a summary to paste")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--timeout", type=_parse_timeout_s, default=60.0, metavar="S", help="of a whole request (%(default)s)")
    parser.set_defaults(command=_run_scenario)


def _parse_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _parse_positive(text: str) -> float:
    """Parse an option's value as a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _parse_timeout_s(text: str) -> float:
    """Parse an option's value as a timeout in seconds, above 0 and short enough for the operating system."""
    value = _parse_positive(text)
    try:
        check_timeout(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _parse_url(text: str) -> str:
    """Return an option's value unchanged if it is a valid URL of a server."""
    try:
        ServerAddress.parse_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None
    # Reports contain the URL, and requests are sent without them.
    if httpx.URL(text).userinfo:
        raise argparse.ArgumentTypeError("the URL must have no user name and password; --api-key sends a key")
    return text


def _parse_objective(text: str) -> LoadObjective:
    """Parse an option's value as an objective such as p99<20ms, with argparse's error if it is not one."""
    try:
        return parse_objective(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
