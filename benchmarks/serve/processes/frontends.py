"""Front ends for the process with the device: `python -m benchmarks.serve.processes.frontends --out FILE.csv`.

LayerNorm of float32 rows of 1024 with a registered layer, npy in and out, sent by the C client.  A server without
front ends and one with each number of them have turns in each round, and ratios are computed within a round.  The
numbers of cores that the client and each process kept busy show the limit.
"""

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.servers import server_metrics, server_processes
from benchmarks.serve.servers.processor_time import read_processor_seconds
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = (
    *("nbytes", "connections", "front_ends", "round", "per_second", "bytes_per_second", "p50_ms", "p99_ms"),
    *("rate_over_none", "p50_over_none", "requests_a_launch", "client_cores", "server_cores"),
)
_NPY = "application/x-npy"
# Bytes of x, and number of connections.
_REQUESTS = ((2**12, 1), (2**12, 64), (2**20, 1), (2**20, 64), (2**24, 1), (2**24, 16))


@dataclass(frozen=True, slots=True)
class _ServerProcesses:
    """A server, its processes by name, and its number of HTTP processes."""

    server: ServerProcess
    pids: dict[str, int]
    front_ends: int


def main() -> int:
    options = command.make_parser("the servers and of the client")
    options.add_argument("--backend", default="torch", help="of the servers: torch or triton")
    options.add_argument("--frontends", type=int, nargs="+", default=(1, 2), help="beside none")
    command.add_turn_options(options, "each server", 1.5, rounds=5)
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each size, number of connections, server and round."""
    server_cores, client_cores = asked.cores
    with contextlib.ExitStack() as stack:
        client = CompiledClient(folder, client_cores)
        counts = (0, *asked.frontends)
        servers = [
            _start_server(stack, folder / str(count), server_cores, asked.backend, count) for count in counts
        ]
        for nbytes, connections in _REQUESTS:
            with results.run_part(f"{nbytes} bytes, {connections} connections"):
                _measure_requests(results, client, servers, nbytes, connections, asked.rounds, asked.seconds)


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """The medians of the rounds in Markdown."""
    lines = [
        "| bytes of x | connections | front ends | requests/s | GB/s in and out | p50, ms | p99, ms | over none |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    kinds = dict.fromkeys((row["nbytes"], row["connections"], row["front_ends"]) for row in rows)
    for kind in kinds:
        own = [row for row in rows if (row["nbytes"], row["connections"], row["front_ends"]) == kind]

        def compute_median(column: str, own: Sequence[Mapping[str, object]] = own) -> float:
            return median(float(str(row[column])) for row in own)

        figures = (
            f"{compute_median('per_second'):.0f} | {compute_median('bytes_per_second') / 1e9:.2f} | "
            f"{compute_median('p50_ms'):.3f}"
        )
        said = " | ".join(map(str, kind))
        lines.append(
            f"| {said} | {figures} | {compute_median('p99_ms'):.3f} | {compute_median('rate_over_none'):.2f} |"
        )
    return "\n".join(lines)


def _start_server(
    stack: contextlib.ExitStack, folder: Path, cores: set[int], backend: str, count: int
) -> _ServerProcesses:
    folder.mkdir()
    parameters = checked_requests.make_parameters()
    options = ("--frontends", str(count))
    served, _ = stack.enter_context(server_processes.run_normserve(cores, folder, parameters, backend, options))
    told = httpx.get(f"http://127.0.0.1:{served.address}/v1/info", timeout=30).raise_for_status().json()
    pids = {f"front end {each['index']}": each["pid"] for each in told.get("front_ends", ())}
    if count:
        # The remaining child process owns the device.
        children = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text(encoding="ascii").split()
        (pids["owner"],) = set(map(int, children)).difference(pids.values())
    pids["server"] = served.pid
    return _ServerProcesses(served, pids, count)


def _measure_requests(
    results: CsvResults,
    client: CompiledClient,
    servers: Sequence[_ServerProcesses],
    nbytes: int,
    connections: int,
    rounds: int,
    seconds: float,
) -> None:
    x = checked_requests.make_x(nbytes)
    body = checked_requests.encode_npy(x)
    for server in servers:
        url = f"http://127.0.0.1:{server.server.address}{server.server.path}"
        answer = httpx.post(url, content=body, headers={"content-type": _NPY}, timeout=300)
        checked_requests.check_response(x, checked_requests.make_parameters(), answer.raise_for_status().content)
        # A first turn, to allocate slabs for this many requests.
        client.run_turn(server.server, _NPY, body, seconds / 3, connections)
    for number in range(rounds):
        turns = {}
        for server in random.Random(number).sample(servers, len(servers)):
            began, used = time.perf_counter(), read_processor_seconds(server.pids)
            before = server_metrics.fetch_samples(server.server.address)
            turn = client.run_turn(server.server, _NPY, body, seconds, connections)
            shared = server_metrics.compute_requests_per_launch(
                before, server_metrics.fetch_samples(server.server.address)
            )
            elapsed = time.perf_counter() - began
            busy = {name: (now - used[name]) / elapsed for name, now in read_processor_seconds(server.pids).items()}
            turns[server.front_ends] = turn, shared, busy
        alone, _, _ = turns[0]
        for count, (turn, shared, busy) in sorted(turns.items()):
            results.add_row(
                {
                    "nbytes": nbytes,
                    "connections": connections,
                    "front_ends": count,
                    "round": number,
                    "per_second": f"{turn.per_second:.1f}",
                    "bytes_per_second": f"{2 * len(body) * turn.per_second:.0f}",
                    "p50_ms": f"{turn.p50_s * 1000:.4f}",
                    "p99_ms": f"{turn.p99_s * 1000:.4f}",
                    "rate_over_none": f"{turn.per_second / alone.per_second:.3f}",
                    "p50_over_none": f"{turn.p50_s / alone.p50_s:.3f}",
                    "requests_a_launch": f"{shared:.2f}",
                    "client_cores": f"{turn.client_cores:.2f}",
                    "server_cores": ", ".join(f"{name} {cores:.2f}" for name, cores in busy.items()),
                }
            )


if __name__ == "__main__":
    sys.exit(main())
