"""Two versions of the server for one client on the same host, in alternating turns.

usage: python -m benchmarks.serve.callers.pairs --before CHECKOUT --out FILE.csv

CHECKOUT is a checkout of the older version of the server (`git worktree add CHECKOUT COMMIT`); the newer one is
what runs this, and so is the client of both.  LayerNorm forward of [rows, 1024] float32, whole calls, x and y in
memory that is shared with the server: the host's, and with `--backend triton` the device's; then forward and
backward of a module.  A pair is a short turn with each server; the result is the median of the ratios within pairs,
with its confidence interval of 95 %.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch
from normserve.client import Client
from normserve.client.torch import LayerNorm

from benchmarks.serve import command
from benchmarks.serve.callers.timing import times
from benchmarks.serve.clients import posts
from benchmarks.serve.pairs import interval
from benchmarks.serve.report.results import Results
from benchmarks.serve.servers import launch

SIZES = {**command.SIZES, "256 MiB": 2**28}
COLUMNS = ("memory", "what", "pair", "before_us", "after_us", "after_over_before")
_COLS = 1024
_MODULE_ROWS, _MODULE_COLS = 16, 4096
_QUOTA = 2**32
_SOURCES = ("kernels", "service", "loadtest")
# Until a server answers such calls as it will answer all later ones.
_WARM_S = 0.5

Call = Callable[[], object]


def main() -> int:
    options = command.parser("callers.pairs", "the servers and of the client")
    options.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--seconds", type=float, default=0.1, help="of each turn")
    options.add_argument("--backend", default="torch", help="of both: torch or triton")
    return command.run(options.parse_args(), COLUMNS, measure)


def measure(results: Results, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each memory, size and pair."""
    server_cores, client_cores = asked.cores
    devices = {"host memory": "cpu"} | ({"device memory": "cuda"} if asked.backend == "triton" else {})
    with contextlib.ExitStack() as stack:
        clients = {}
        for version, source in (("before", asked.before), ("after", Path())):
            own = folder / version
            own.mkdir()
            shared = own / "local.sock"
            quotas = ("--local-bytes", str(_QUOTA), "--local-device-bytes", str(_QUOTA))
            sources = [str((source / root).resolve()) for root in _SOURCES]
            path = ":".join([*sources, os.environ.get("PYTHONPATH", "")])
            environment = {"PYTHONPATH": path}
            options = ("--local", str(shared), *quotas)
            served = launch.normserve(
                server_cores, own, posts.make_parameters(), asked.backend, options, environment=environment
            )
            stack.enter_context(served)
            clients[version] = stack.enter_context(Client(f"unix://{shared}"))
        os.sched_setaffinity(0, client_cores)
        for memory, device in devices.items():
            for what, calls in _cases(clients, None if device == "cpu" else device):
                with results.part(f"{memory}, {what}"):
                    _measure(results, memory, what, calls, asked)


def _cases(clients: Mapping[str, Client], device: str | None) -> Iterator[tuple[str, dict[str, Call]]]:
    for size, nbytes in SIZES.items():
        shape = (nbytes // 4 // _COLS, _COLS)
        yield size, {version: _forward(client, shape, device) for version, client in clients.items()}
    yield "module", {version: _step(client, device) for version, client in clients.items()}


def _forward(client: Client, shape: tuple[int, int], device: str | None) -> Call:
    x = client.empty(shape, torch.float32, device=device).normal_()
    return lambda: client.layer_norm(x).y


def _step(client: Client, device: str | None) -> Call:
    """Forward and backward of a module whose parameters are in shared memory, too."""
    module = LayerNorm(_MODULE_COLS, client=client, device=device, dtype=torch.bfloat16)
    for parameter in module.parameters():
        place = client.empty(parameter.shape, torch.bfloat16, device=device)
        parameter.data = place.copy_(parameter.data)
    shape = (_MODULE_ROWS, _MODULE_COLS)
    x, dy = (client.empty(shape, torch.bfloat16, device=device).normal_() for _ in range(2))
    inputs = [x.requires_grad_(), *module.parameters()]
    return lambda: torch.autograd.grad(module(x), inputs, dy)


def _measure(
    results: Results, memory: str, what: str, calls: Mapping[str, Call], asked: argparse.Namespace
) -> None:
    for call in calls.values():
        times(call, _WARM_S)
    ratios = []
    for number in range(asked.pairs):
        turns = list(calls.items())[:: 1 if number % 2 else -1]
        taken = {version: median(times(call, asked.seconds)) for version, call in turns}
        ratios.append(taken["after"] / taken["before"])
        results.add(
            {
                "memory": memory,
                "what": what,
                "pair": number,
                "before_us": f"{1e6 * taken['before']:.4g}",
                "after_us": f"{1e6 * taken['after']:.4g}",
                "after_over_before": f"{ratios[-1]:.4f}",
            }
        )
    low, high = interval(ratios)
    print(f"{memory}, {what}: {median(ratios):.3f} of before, 95 % interval {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
