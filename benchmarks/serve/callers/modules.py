"""Times of modules whose passes run in the service: `python -m benchmarks.serve.callers.modules --out FILE.csv`.

Forward and backward of a LayerNorm of x [rows, cols] with weight and bias, all gradients: `normserve.client.torch`
over shared memory (x and dy already in it, or in other memory), over HTTP by the Unix socket and by TCP, compared
with fusednorm's and torch's modules in the caller's process with as many threads as the server.  In each round each
has a turn, in an order that changes from round to round; ratios are computed within a round, and their median is
the result.  Results and gradients are compared with torch's in float64 before anything is timed.
"""

import argparse
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import fusednorm
import torch
from normserve.client import Client
from normserve.client.torch import LayerNorm
from torch import Tensor, nn

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.callers.call_timing import time_calls_s
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.servers import server_processes

SHARED, COPIED, UNIX, TCP = "shared memory", "shared memory, x copied", "HTTP, Unix socket", "HTTP, TCP"
FUSEDNORM, TORCH = "fusednorm in process", "torch in process"
COLUMNS = ("module", "device", "rows", "cols", "dtype", "round", "per_second", "p50_ms", "over_fusednorm")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# For values up to about ten, and sums over the rows.
_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

Step = Callable[[], Sequence[Tensor]]


def main() -> int:
    options = command.make_parser("the server and of the caller")
    options.add_argument("--rows", type=int, action="append", help="of x; 16 and 1024 if not given")
    options.add_argument("--cols", type=int, default=4096, help="of x")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of x and the parameters")
    options.add_argument("--backend", default="torch", help="of the server: torch or triton")
    options.add_argument("--device", default="cpu", help="of the caller's tensors: cpu or cuda")
    command.add_turn_options(options, "each module", 0.5)
    options.add_argument("--threads", type=int, default=1, help="of each operation on the CPU, wherever it runs")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each number of rows, module and round."""
    server_cores, caller_cores = asked.cores
    shared = folder / "local.sock"
    options = ("--local", str(shared), "--cpu-threads", str(asked.threads))
    torch.set_num_threads(asked.threads)
    with server_processes.run_normserve(
        server_cores, folder, checked_requests.make_parameters(), asked.backend, options
    ) as served:
        tcp, unix = served
        os.sched_setaffinity(0, caller_cores)
        urls = {
            SHARED: f"unix://{shared}",
            UNIX: f"http+unix://{unix.address}",
            TCP: f"http://127.0.0.1:{tcp.address}",
        }
        for rows in asked.rows or (16, 1024):
            with results.run_part(f"{rows} rows"), contextlib.ExitStack() as stack:
                clients = {name: stack.enter_context(Client(url)) for name, url in urls.items()}
                _time_steps(results, rows, dict(_iterate_steps(clients, rows, asked)), asked)


def _iterate_steps(
    clients: Mapping[str, Client], rows: int, asked: argparse.Namespace
) -> Iterator[tuple[str, Step]]:
    """A forward and a backward pass of each module, all with the same tensors."""
    dtype, cols = DTYPES[asked.dtype], asked.cols
    numbers = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, cols, generator=numbers).to(asked.device, dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, generator=numbers).to(asked.device, dtype) for _ in range(2))
    kind = {"device": asked.device, "dtype": dtype}
    modules: dict[str, nn.Module] = {
        FUSEDNORM: fusednorm.LayerNorm(cols, **kind),
        TORCH: nn.LayerNorm(cols, **kind),
        COPIED: LayerNorm(cols, client=clients[SHARED], **kind),
    }
    modules |= {name: LayerNorm(cols, client=client, **kind) for name, client in clients.items()}
    right = _make_step(nn.LayerNorm(cols, device=asked.device, dtype=torch.float64), x, dy, weight, bias)()
    for name, module in modules.items():
        there = x, dy
        if name == SHARED and asked.device == "cpu":
            there = clients[SHARED].empty(x.shape, dtype).copy_(x), clients[SHARED].empty(x.shape, dtype).copy_(dy)
        step = _make_step(module, *there, weight, bias)
        # On the CPU torch sums the parameters' gradients in their own type.
        compared = 2 if name == TORCH else len(right)
        for got, expected in zip(step()[:compared], right[:compared], strict=True):
            tolerance = _TOLERANCES[asked.dtype] * max(1.0, expected.abs().max().item() / 10)
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
        yield name, step


def _make_step(module: nn.Module, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> Step:
    """y and the gradients of x, weight and bias, complete when it returns."""
    module.load_state_dict({"weight": weight, "bias": bias})
    of_module = next(module.parameters()).dtype
    x, dy = x.to(of_module).detach().requires_grad_(), dy.to(of_module)
    inputs = [x, *module.parameters()]

    def run_step() -> Sequence[Tensor]:
        y = module(x)
        gradients = torch.autograd.grad(y, inputs, dy)
        if x.is_cuda:
            torch.cuda.synchronize()
        return y.detach(), *gradients

    return run_step


def _time_steps(results: CsvResults, rows: int, steps: Mapping[str, Step], asked: argparse.Namespace) -> None:
    for number in range(asked.rounds):
        taken: dict[str, list[float]] = {}
        for name in random.Random(number).sample(list(steps), len(steps)):
            time_calls_s(steps[name], asked.seconds / 5)
            taken[name] = time_calls_s(steps[name], asked.seconds)
        p50 = {name: median(each) for name, each in taken.items()}
        for name, each in taken.items():
            results.add_row(
                {
                    "module": name,
                    "device": asked.device,
                    "rows": rows,
                    "cols": asked.cols,
                    "dtype": asked.dtype,
                    "round": number,
                    "per_second": f"{len(each) / sum(each):.5g}",
                    "p50_ms": f"{1000 * p50[name]:.4g}",
                    "over_fusednorm": f"{p50[name] / p50[FUSEDNORM]:.4g}",
                }
            )


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each number of rows and module: medians of p50, and of its ratio to fusednorm's."""
    lines = ["| rows | module | p50, ms | over fusednorm in process |", "|---|---|---|---|"]
    for count, module in dict.fromkeys((row["rows"], row["module"]) for row in rows):
        of = [row for row in rows if (row["rows"], row["module"]) == (count, module)]
        p50, ratio = (median(float(str(row[column])) for row in of) for column in ("p50_ms", "over_fusednorm"))
        lines.append(f"| {count} | {module} | {p50:.3g} | {ratio:.3g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
