"""Time of whole calls from Python: `python -m benchmarks.serve.callers.client --out FILE.csv`.

Arrays in and out, LayerNorm of [rows, 1024] float32 with a registered layer over one connection: the clients of
`normserve.client`, plain httpx, and some thirty lines over a socket with the minimum work of a caller.  One server
has TCP and the Unix socket, another has TLS, both on the same core; the callers have another core.  In each round
each caller has a turn, in an order that changes from round to round; ratios are computed within a round, and their
median is the result.  Responses are compared with torch's before anything is timed.  The peak memory of a call is
measured in separate processes.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.csv_results import CsvResults, compute_column_median
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests, python_callers
from benchmarks.serve.clients.python_callers import CALLERS, ServerEndpoint
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.certificates import write_certificates

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16} | command.SIZES
TRANSPORTS = ("tcp", "unix", "tls")
COLUMNS = (
    *("transport", "size", "nbytes", "caller", "round"),
    *("per_second", "p50_ms", "cpu_ms", "over_socket", "peak_over_body"),
)


def main() -> int:
    options = command.make_parser("the servers and of the callers")
    command.add_size_option(options, SIZES)
    options.add_argument("--transport", choices=TRANSPORTS, action="append", help="all if not given")
    options.add_argument("--caller", choices=CALLERS, action="append", help="besides the socket; all if not given")
    command.add_turn_options(options, "each caller", 1.0)
    options.add_argument("--backend", default="torch", help="of the servers: torch or triton")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each transport, size, caller and round."""
    server_cores, caller_cores = asked.cores
    parameters = checked_requests.make_parameters()
    transports = asked.transport or TRANSPORTS
    chosen = [python_callers.SOCKET, *(name for name in asked.caller or CALLERS if name != python_callers.SOCKET)]
    with contextlib.ExitStack() as stack:
        endpoints = dict(_start_endpoints(stack, folder, server_cores, asked.backend, transports))
        os.sched_setaffinity(0, caller_cores)
        for size in asked.size or SIZES:
            x = checked_requests.make_x(SIZES[size])
            right = checked_requests.compute_expected(x, parameters).float().numpy()
            for transport in transports:
                with results.run_part(f"{transport}, {size}"):
                    peaks = {name: _measure_peak_bytes(name, endpoints[transport], x) for name in chosen}
                    of_all = {"transport": transport, "size": size, "nbytes": x.nbytes}
                    turns = _time_rounds(chosen, endpoints[transport], x, right, asked.rounds, asked.seconds)
                    for number, timed in enumerate(turns):
                        for name, figures in timed.items():
                            over = figures["p50_ms"] / timed[python_callers.SOCKET]["p50_ms"]
                            row = {"caller": name, "round": number, **figures, "over_socket": over}
                            row["peak_over_body"] = peaks[name] / x.nbytes
                            shown = {key: f"{value:.4g}" for key, value in row.items() if isinstance(value, float)}
                            results.add_row(of_all | row | shown)


def _start_endpoints(
    stack: contextlib.ExitStack, folder: Path, cores: set[int], backend: str, transports: Sequence[str]
) -> Iterator[tuple[str, ServerEndpoint]]:
    parameters = checked_requests.make_parameters()
    plain = folder / "plain"
    plain.mkdir()
    tcp, unix = stack.enter_context(server_processes.run_normserve(cores, plain, parameters, backend))
    yield "tcp", ServerEndpoint(f"http://127.0.0.1:{tcp.address}", server_processes.LAYER)
    yield "unix", ServerEndpoint(f"http+unix://{unix.address}", server_processes.LAYER)
    if "tls" in transports:
        secured = folder / "tls"
        secured.mkdir()
        trusted = write_certificates(folder)
        options = ("--tls-cert", str(folder / "server.pem"))
        tls, _ = stack.enter_context(
            server_processes.run_normserve(cores, secured, parameters, backend, options, trust=trusted)
        )
        yield (
            "tls",
            ServerEndpoint(
                f"https://127.0.0.1:{tls.address}", server_processes.LAYER, str(folder / "authority.pem")
            ),
        )


def _time_rounds(
    chosen: Sequence[str], endpoint: ServerEndpoint, x: np.ndarray, right: np.ndarray, rounds: int, seconds: float
) -> Iterator[dict[str, dict[str, float]]]:
    """The times of each caller in each round."""
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        asked = {name: stack.enter_context(CALLERS[name](endpoint, x, runner)) for name in chosen}
        for caller in asked.values():
            (y,) = caller.measure(1, 0.0).results
            np.testing.assert_allclose(y, right, rtol=1e-5, atol=3e-5)
        for number in range(rounds):
            timed = {}
            for name in random.Random(number).sample(chosen, len(chosen)):
                asked[name].measure(1, seconds / 5)
                busy = time.process_time()
                times = asked[name].measure(3, seconds).seconds
                busy = time.process_time() - busy
                timed[name] = {
                    "per_second": len(times) / sum(times),
                    "p50_ms": median(times) * 1000,
                    "cpu_ms": busy / len(times) * 1000,
                }
            yield timed


def _measure_peak_bytes(name: str, endpoint: ServerEndpoint, x: np.ndarray) -> int:
    """Peak memory that a call adds to that of its process, which already has x."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_report_growth, args=(name, endpoint, x.shape, theirs))
    process.start()
    theirs.close()
    try:
        grown: int = ours.recv()
    finally:
        process.join()
    return grown


def _report_growth(
    name: str, endpoint: ServerEndpoint, shape: tuple[int, ...], pipe: "multiprocessing.connection.Connection"
) -> None:
    x = np.ones(shape, np.float32)
    small = np.ones((1, shape[1]), np.float32)
    with asyncio.Runner() as runner, CALLERS[name](endpoint, x, runner) as caller:
        with CALLERS[name](endpoint, small, runner) as warm:
            warm.measure(3, 0.0)
        before = _read_memory_bytes("VmRSS")
        # Reset the peak.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        caller.measure(1, 0.0)
        pipe.send(_read_memory_bytes("VmHWM") - before)


def _read_memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """For each transport a line for each size: the socket's p50, and each caller's ratio to it."""
    names = list(dict.fromkeys(str(row["caller"]) for row in rows))
    lines = []
    for transport in dict.fromkeys(str(row["transport"]) for row in rows):
        others = [name for name in names if name != python_callers.SOCKET]
        lines += [
            f"| {transport} | socket, ms | " + " | ".join(f"{name}, ms | over socket" for name in others) + " |",
            "|" + "---|" * (2 + 2 * len(others)),
        ]
        of_transport = [row for row in rows if row["transport"] == transport]
        for size in dict.fromkeys(str(row["size"]) for row in of_transport):
            of = {name: [r for r in of_transport if (r["size"], r["caller"]) == (size, name)] for name in names}
            cells = [size, f"{compute_column_median(of[python_callers.SOCKET], 'p50_ms'):.3g}"]
            for name in others:
                cells += [
                    f"{compute_column_median(of[name], 'p50_ms'):.3g}",
                    f"{compute_column_median(of[name], 'over_socket'):.3g}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
