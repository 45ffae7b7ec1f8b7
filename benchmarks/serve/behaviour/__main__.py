"""Behaviour of the server under stress: `python -m benchmarks.serve.behaviour --out FILE.csv`.

Three times the load that it can serve, clients that disconnect at every stage, a mixture of requests for any time,
many single rows.  The server is on one core and the client on another; responses are compared with torch's.
"""

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.behaviour import stress_scenarios
from benchmarks.serve.behaviour.stress_scenarios import StressMeasurement
from benchmarks.serve.clients.checked_requests import CheckedRequest, make_parameters
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = ("scenario", "measure", "value", "wanted")

# Requests in flight before the next is refused: one that is received, and one that is computed or sent.
_AT_ONCE = 2
_SMALL, _MEDIUM, _LARGE, _HUGE = 2**12, 2**18, 2**21, 2**24

Play = Callable[[ServerProcess, Callable[[int], CheckedRequest], bool], Awaitable[list[StressMeasurement]]]

# The server's options and the scenario; with `full` it runs long enough to be sure.
SCENARIOS: dict[str, tuple[Sequence[str], Play]] = {
    "overload": (
        ("--max-inflight-requests", str(_AT_ONCE)),
        lambda at, post, full: stress_scenarios.run_overload(at, post(_HUGE), 60 if full else 20, _AT_ONCE),
    ),
    "disturbance": (
        (),
        lambda at, post, full: stress_scenarios.run_disturbance(
            at, [post(nbytes) for nbytes in (_SMALL, _MEDIUM, _LARGE)], 10_000 if full else 1_000
        ),
    ),
    "mixed load": (
        (),
        lambda at, post, full: stress_scenarios.run_mixed_load(
            at, [post(nbytes) for nbytes in (_SMALL, _MEDIUM, _LARGE, _HUGE)], 600 if full else 20
        ),
    ),
    "single rows": (
        (),
        lambda at, post, full: stress_scenarios.run_single_rows(at, post(_SMALL), 20 if full else 3, ">= 8"),
    ),
    "single rows, no batching": (
        ("--max-batch-requests", "1"),
        lambda at, post, full: stress_scenarios.run_single_rows(at, post(_SMALL), 20 if full else 3, "-"),
    ),
}


def main() -> int:
    options = command.make_parser("the server and of the client")
    options.add_argument("--backend", default="torch", help="of the server: torch or triton")
    options.add_argument("--full", action="store_true", help="10,000 disturbed requests, ten minutes of mixed load")
    options.add_argument("--only", choices=SCENARIOS, action="append", help="scenarios to run")
    return command.run_command(options.parse_args(), COLUMNS, measure)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each measured number of each scenario."""
    server_cores, client_cores = asked.cores
    os.sched_setaffinity(0, client_cores)
    print("| scenario | measure | value | wanted |\n|---|---|---|---|")
    for number, name in enumerate(asked.only or SCENARIOS):
        options, play = SCENARIOS[name]
        parameters = make_parameters()
        own = folder / str(number)
        own.mkdir()
        with (
            results.run_part(name),
            server_processes.run_normserve(server_cores, own, parameters, asked.backend, options) as (server, _),
        ):
            for each in uvloop.run(_run_scenario(play, server, parameters, asked.full)):
                results.add_row({"scenario": name} | asdict(each))
                print(f"| {name} | {each.measure} | {each.value:.4g} | {each.wanted} |", flush=True)


async def _run_scenario(
    play: Play, server: ServerProcess, parameters: Mapping[str, np.ndarray], full: bool
) -> list[StressMeasurement]:
    return await play(server, lambda nbytes: CheckedRequest(server.path, nbytes, parameters), full)


if __name__ == "__main__":
    sys.exit(main())
