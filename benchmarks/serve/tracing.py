"""The cost of traces: `python -m benchmarks.serve.tracing --out FILE.csv`.

Servers that trace no request, one in a hundred, and every request, on the same cores; the C client and a collector
that accepts all data run on other cores.  LayerNorm of a row of 1024 float32 with a registered layer, npy in and
out.  In each round one server of each kind has a turn, in an order that changes from round to round; ratios are
computed within a round.  Several servers of each kind take turns, because processes with the same settings differ
by several percent.
"""

import argparse
import contextlib
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.clients.checked_requests import encode_npy, make_parameters, make_x
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = ("connections", "traced", "round", "per_second", "p50_ms", "p99_ms", "rate_over_untraced")
#: Kinds of servers and their trace ratio; None: no traces.
TRACED = {"nothing": None, "one in a hundred": "0.01", "everything": "1"}
_CONNECTIONS = (1, 64)
_SERVERS_OF_A_KIND = 3
_X_BYTES = 4096


def main() -> int:
    options = command.make_parser("the servers and of the client")
    command.add_turn_options(options, "each server with each number of connections", 1.5, rounds=11)
    options.add_argument("--backend", default="torch", help="of the servers: torch or triton")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each server, number of connections and round."""
    server_cores, client_cores = asked.cores
    parameters, body = make_parameters(), encode_npy(make_x(_X_BYTES))
    with contextlib.ExitStack() as stack:
        served: dict[str, list[ServerProcess]] = {}
        endpoint = stack.enter_context(_run_collector())
        for number, (traced, ratio) in itertools.product(range(_SERVERS_OF_A_KIND), TRACED.items()):
            own = folder / f"{traced} {number}"
            own.mkdir()
            options = () if ratio is None else ("--trace-endpoint", endpoint, "--trace-ratio", ratio)
            running = server_processes.run_normserve(server_cores, own, parameters, asked.backend, options)
            served.setdefault(traced, []).append(stack.enter_context(running)[0])
        os.sched_setaffinity(0, client_cores)
        client = CompiledClient(folder, client_cores)
        for connections in _CONNECTIONS:
            with results.run_part(f"{connections} connections"):
                for number in range(asked.rounds):
                    turn = {traced: servers[number % len(servers)] for traced, servers in served.items()}
                    _time_round(results, client, turn, body, connections, number, asked.seconds)


def _time_round(
    results: CsvResults,
    client: CompiledClient,
    served: Mapping[str, ServerProcess],
    body: bytes,
    connections: int,
    number: int,
    seconds: float,
) -> None:
    turns = {}
    for traced in random.Random(number).sample([*served], len(served)):
        turns[traced] = client.run_turn(served[traced], "application/x-npy", body, seconds, connections)
    for traced, turn in turns.items():
        results.add_row(
            {
                "connections": connections,
                "traced": traced,
                "round": number,
                "per_second": f"{turn.per_second:.1f}",
                "p50_ms": f"{1000 * turn.p50_s:.4f}",
                "p99_ms": f"{1000 * turn.p99_s:.4f}",
                "rate_over_untraced": f"{turn.per_second / turns['nothing'].per_second:.4f}",
            }
        )


class _DroppingHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _run_collector() -> Iterator[str]:
    """A collector that accepts spans and drops them; its URL."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _DroppingHandler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each number of connections and kind of server: medians of the rounds."""
    lines = [
        "| connections | traced | answers a second | p50, ms | rate over none traced |",
        "|---|---|---|---|---|",
    ]
    for connections, traced in dict.fromkeys((row["connections"], row["traced"]) for row in rows):
        of = [row for row in rows if (row["connections"], row["traced"]) == (connections, traced)]
        rate, p50 = (median(float(str(row[name])) for row in of) for name in ("per_second", "p50_ms"))
        ratios = [float(str(row["rate_over_untraced"])) for row in of]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(f"| {connections} | {traced} | {rate:.0f} | {p50:.3f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
