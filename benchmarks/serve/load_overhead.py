"""The overhead of normload itself: `python -m benchmarks.serve.load_overhead --out FILE.csv`.

One process of normload and the client in C in alternating turns, the same request from both: LayerNorm of float32
rows of 1024, closed loops, over TCP and the Unix socket.  The server is on one core, the clients on another.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from normload.adapters.native import NativeAdapter
from normload.clients.client_worker import ClientWorker, SendSegmentCommand, WorkerSetup
from normload.load.request_cases import RequestCase
from normload.load.scenarios import LoadPhase
from normserve.client import DType

from benchmarks.harness.csv_results import CsvResults, compute_column_median
from benchmarks.serve import command
from benchmarks.serve.clients.c_client import ClosedLoopTimes, CompiledClient
from benchmarks.serve.clients.checked_requests import COLS, make_parameters
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

#: Rows and connections.
CASES = {"1 row": (1, 1), "1 row, 16 connections": (1, 16), "256 rows": (256, 1)}
COLUMNS = (
    *("transport", "case", "client", "round"),
    *("per_second", "p50_ms", "client_cores", "rate_over_c", "p50_over_c"),
)
_MEDIA_TYPE = "application/x-safetensors"


def main() -> int:
    options = command.make_parser("the server and of the clients")
    options.add_argument("--case", choices=CASES, action="append", help="all if not given")
    command.add_turn_options(options, "each client", 1.5)
    options.add_argument("--backend", default="torch", help="of the server: torch or triton")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each transport, case, client and round."""
    server_cores, client_cores = asked.cores
    with server_processes.run_normserve(server_cores, folder, make_parameters(), asked.backend) as served:
        client = CompiledClient(folder, client_cores)
        os.sched_setaffinity(0, client_cores)
        for transport, server in zip(("tcp", "unix"), served, strict=True):
            for case in asked.case or CASES:
                with results.run_part(f"{transport}, {case}"):
                    _measure_case(results, client, server, transport, case, asked.rounds, asked.seconds)


def _measure_case(
    results: CsvResults,
    client: CompiledClient,
    server: ServerProcess,
    transport: str,
    name: str,
    rounds: int,
    seconds: float,
) -> None:
    rows, connections = CASES[name]
    case = RequestCase("layer_norm", (rows, COLS), DType.FLOAT32, affine=False)
    exchange = NativeAdapter().make_request(case, case.make_tensors())
    body = b"".join(bytes(part) for part in exchange.parts)
    asked = replace(server, path=exchange.target)
    url = f"http://127.0.0.1:{server.address}" if transport == "tcp" else f"http+unix://{server.address}"
    worker = ClientWorker(WorkerSetup(url, "normserve", None, 60.0, [(case, 1.0)], 0, 0.02, 0, 1))
    worker.send_and_check_each_once()
    for number in range(rounds):
        turns: dict[str, ClosedLoopTimes] = {}
        for which in random.Random(number).sample(("c", "normload"), 2):
            if which == "c":
                turns[which] = client.run_turn(asked, _MEDIA_TYPE, body, seconds, connections)
            else:
                _run_turn(worker, number, seconds / 5, connections)
                turns[which] = _run_turn(worker, number, seconds, connections)
        for which, turn in turns.items():
            results.add_row(
                {
                    "transport": transport,
                    "case": name,
                    "client": which,
                    "round": number,
                    "per_second": f"{turn.per_second:.1f}",
                    "p50_ms": f"{turn.p50_s * 1000:.4f}",
                    "client_cores": f"{turn.client_cores:.3f}",
                    "rate_over_c": f"{turn.per_second / turns['c'].per_second:.3f}",
                    "p50_over_c": f"{turn.p50_s / turns['c'].p50_s:.3f}",
                }
            )


class _SilentParent:
    """A parent process that only receives."""

    def poll(self) -> bool:
        return False

    def send(self, _: object) -> None:
        return None


def _run_turn(worker: ClientWorker, number: int, seconds: float, connections: int) -> ClosedLoopTimes:
    phase = LoadPhase("turn", "closed", seconds, connections=connections)
    load = SendSegmentCommand(number, (phase,), time.perf_counter(), connections, 0.0)
    done = worker.send_segment(load, cast(Any, _SilentParent()))
    (tally,) = done.tallies
    return ClosedLoopTimes(
        tally.sum_in_time().ok / seconds,
        tally.service.compute_percentile_s(50),
        tally.service.compute_percentile_s(99),
        done.cpu_fraction,
    )


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each transport and case: both clients' medians, and the medians of their ratios."""
    lines = ["| | C, 1/s | normload, 1/s | of C's rate | of C's p50 | cores |", "|---|---|---|---|---|---|"]
    for key in dict.fromkeys((str(row["transport"]), str(row["case"])) for row in rows):
        of = {
            which: [row for row in rows if (row["transport"], row["case"], row["client"]) == (*key, which)]
            for which in ("c", "normload")
        }
        cells = [f"{compute_column_median(of[which], 'per_second'):.0f}" for which in of]
        cells += [
            f"{compute_column_median(of['normload'], each):.2f}"
            for each in ("rate_over_c", "p50_over_c", "client_cores")
        ]
        lines.append(f"| {', '.join(key)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
