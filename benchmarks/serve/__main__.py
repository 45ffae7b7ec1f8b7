"""Time whole requests: `python -m benchmarks.serve --out FILE.csv`.

By default all servers run at once on one core and the C client on another; one connection is kept alive, npy in
and out, LayerNorm of [rows, 1024] float32 with a registered layer.  In each round each server has a turn, in an
order that changes from round to round; ratios are computed within a round, and their median is the result.
Responses are compared with torch's before anything is timed.
"""

import argparse
import contextlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.clients.checked_requests import check_response, encode_npy, make_parameters, make_x
from benchmarks.serve.command import SIZES
from benchmarks.serve.programs.build import compile_program
from benchmarks.serve.server_table import OURS, format_table
from benchmarks.serve.servers import server_metrics, server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = (
    *("size", "nbytes", "server", "round"),
    *("per_second", "p50_ms", "bytes_per_second", "ours_over_this"),
)
_NPY = "application/x-npy"


def main() -> int:
    options = command.make_parser("the servers and of the client")
    command.add_size_option(options)
    command.add_turn_options(options, "each server at each size", 1.5)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both HTTP servers")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each server, size and round."""
    server_cores, client_cores = asked.cores
    client, echo = CompiledClient(folder, client_cores), compile_program(folder, "echo")
    parameters = make_parameters()
    backend = "triton" if asked.device == "cuda" else "torch"
    with contextlib.ExitStack() as stack:
        http = [
            *stack.enter_context(server_processes.run_normserve(server_cores, folder, parameters, backend)),
            *stack.enter_context(server_processes.run_plain(server_cores, folder, parameters, asked.device)),
        ]
        for size in asked.size or SIZES:
            with results.run_part(size):
                x = make_x(SIZES[size])
                body = encode_npy(x)
                for server in http:
                    _check_response(server, x, body, parameters)
                with server_processes.run_echo(server_cores, echo, len(body)) as echoing:
                    _time_rounds(results, client, [*http, *echoing], size, body, asked.rounds, asked.seconds)


def _time_rounds(
    results: CsvResults,
    client: CompiledClient,
    turns: list[ServerProcess],
    size: str,
    body: bytes,
    rounds: int,
    seconds: float,
) -> None:
    ours = next(server for server in turns if server.name == OURS)
    before = server_metrics.fetch_samples(ours.address)
    first = len(results.rows)
    for number in range(rounds):
        random.Random(number).shuffle(turns)
        timed = {server.name: client.run_turn(server, _NPY, body, seconds) for server in turns}
        for name, turn in timed.items():
            results.add_row(
                {
                    "size": size,
                    "nbytes": len(body),
                    "server": name,
                    "round": number,
                    "per_second": f"{turn.per_second:.2f}",
                    "p50_ms": f"{turn.p50_s * 1000:.4f}",
                    "bytes_per_second": f"{2 * len(body) * turn.per_second:.0f}",
                    "ours_over_this": f"{timed[OURS].per_second / turn.per_second:.3f}",
                }
            )
    print(format_table(results.rows[first:]))
    print(server_metrics.format_stages(before, server_metrics.fetch_samples(ours.address)), end="\n\n", flush=True)


def _check_response(
    server: ServerProcess, x: np.ndarray, body: bytes, parameters: Mapping[str, np.ndarray]
) -> None:
    """Compare one response with torch's."""
    is_port = server.address.isdigit()
    transport = httpx.HTTPTransport(uds=None if is_port else server.address)
    url = f"http://127.0.0.1:{server.address}" if is_port else "http://localhost"
    with httpx.Client(base_url=url, transport=transport, timeout=60) as http:
        answer = http.post(server.path, content=body, headers={"content-type": _NPY})
    answer.raise_for_status()
    check_response(x, parameters, answer.content)


if __name__ == "__main__":
    sys.exit(main())
