"""Time saved by sharing memory: `python -m benchmarks.serve.callers.local --out FILE.csv`.

Whole calls, arrays in and out, LayerNorm of [rows, 1024] float32 with a registered layer over one connection: the
clients of `normserve.client` with shared memory, with x already in it or copied into it, compared with some thirty
lines of HTTP over the Unix socket, and with torch's operation in the caller's process with as many threads as the
server.  By default the server is on one core and the callers on another.  In each round each caller has a turn, in
an order that changes from round to round; ratios are computed within a round, and their median is the result.
Responses are compared with torch's before anything is timed.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from normserve.client import AsyncClient, Client

from benchmarks.harness.csv_results import CsvResults, compute_column_median
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.clients.python_callers import CALLERS, SOCKET, AsyncCaller, BlockingCaller, ServerEndpoint
from benchmarks.serve.command import SIZES
from benchmarks.serve.servers import server_processes

SHARED, COPIED, TASK, IN_PROCESS = "shared memory", "shared memory, x copied", "shared memory, async", "in process"
COLUMNS = ("size", "nbytes", "caller", "round", "per_second", "p50_ms", "socket_over_this", "in_process_over_this")


def main() -> int:
    options = command.make_parser("the server and of the callers")
    command.add_size_option(options)
    command.add_turn_options(options, "each caller", 1.0)
    options.add_argument("--threads", type=int, default=1, help="of each operation, wherever it runs")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each size, caller and round."""
    server_cores, caller_cores = asked.cores
    parameters = checked_requests.make_parameters()
    shared = folder / "local.sock"
    options = ("--local", str(shared), "--cpu-threads", str(asked.threads))
    torch.set_num_threads(asked.threads)
    with server_processes.run_normserve(server_cores, folder, parameters, "torch", options) as (_, unix):
        os.sched_setaffinity(0, caller_cores)
        for size in asked.size or SIZES:
            x = checked_requests.make_x(SIZES[size])
            with results.run_part(size), contextlib.ExitStack() as stack:
                runner = stack.enter_context(asyncio.Runner())
                over_http = ServerEndpoint(f"http+unix://{unix.address}", server_processes.LAYER)
                turns = {
                    SOCKET: stack.enter_context(CALLERS[SOCKET](over_http, x, runner)),
                    **stack.enter_context(_open_shared_callers(f"unix://{shared}", x, runner)),
                    IN_PROCESS: BlockingCaller(_make_own_call(x, parameters)),
                }
                _time_callers(
                    results, size, x, turns, checked_requests.compute_expected(x, parameters).float().numpy(), asked
                )


@contextlib.contextmanager
def _open_shared_callers(
    url: str, x: np.ndarray, runner: asyncio.Runner
) -> Iterator[Mapping[str, BlockingCaller | AsyncCaller]]:
    asynchronous = AsyncClient(url)
    with Client(url) as client:
        there = client.empty(x.shape)
        there[:] = x
        theirs = runner.run(asynchronous.empty(x.shape))
        theirs[:] = x
        try:
            yield {
                SHARED: BlockingCaller(lambda: client.layer_norm(there, layer=server_processes.LAYER).y),
                COPIED: BlockingCaller(lambda: client.layer_norm(x, layer=server_processes.LAYER).y),
                TASK: AsyncCaller(runner, asynchronous, theirs, server_processes.LAYER),
            }
        finally:
            runner.run(asynchronous.close())


def _make_own_call(x: np.ndarray, parameters: Mapping[str, np.ndarray]) -> Callable[[], np.ndarray]:
    weight, bias = (torch.from_numpy(parameters[name]) for name in ("weight", "bias"))
    tensor = torch.from_numpy(x)
    norm = torch.nn.functional.layer_norm
    return lambda: norm(tensor, weight.shape, weight, bias).numpy()


def _time_callers(
    results: CsvResults,
    size: str,
    x: np.ndarray,
    turns: Mapping[str, BlockingCaller | AsyncCaller],
    right: np.ndarray,
    asked: argparse.Namespace,
) -> None:
    for caller in turns.values():
        (y,) = caller.measure(1, 0.0).results
        np.testing.assert_allclose(y, right, rtol=1e-5, atol=3e-5)
        del y
    for number in range(asked.rounds):
        taken: dict[str, list[float]] = {}
        for name in random.Random(number).sample(list(turns), len(turns)):
            turns[name].measure(1, asked.seconds / 5)
            taken[name] = turns[name].measure(3, asked.seconds).seconds
        p50 = {name: median(times) for name, times in taken.items()}
        for name, times in taken.items():
            results.add_row(
                {
                    "size": size,
                    "nbytes": x.nbytes,
                    "caller": name,
                    "round": number,
                    "per_second": f"{len(times) / sum(times):.5g}",
                    "p50_ms": f"{1000 * p50[name]:.4g}",
                    "socket_over_this": f"{p50[SOCKET] / p50[name]:.4g}",
                    "in_process_over_this": f"{p50[IN_PROCESS] / p50[name]:.4g}",
                }
            )


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each size and caller: medians of p50, and of the ratios of the socket and of the process to it."""
    lines = [
        "| size | caller | p50, ms | thirty lines of HTTP over this | in process over this |",
        "|---|---|---|---|---|",
    ]
    for size, caller in dict.fromkeys((str(row["size"]), str(row["caller"])) for row in rows):
        of = [row for row in rows if (row["size"], row["caller"]) == (size, caller)]
        cells = [
            f"{compute_column_median(of, column):.3g}"
            for column in ("p50_ms", "socket_over_this", "in_process_over_this")
        ]
        lines.append(f"| {size} | {caller} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
