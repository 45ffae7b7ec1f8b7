"""Time saved by sharing a GPU's memory: `python -m benchmarks.serve.callers.device --out FILE.csv`; needs a GPU.

A server with Triton's kernels, and callers in separate processes.  LayerNorm forward of [rows, 1024] float32, whole
calls: x and y in device memory, in shared pinned memory, or over HTTP, x also elsewhere, compared with torch's
operation in the caller's process and a copy of as many bytes on the device, each complete when it returns.  Then
forward and backward of one module, and of several in a row, with 16 rows of 4096 bfloat16, in the service and in
process; then several clients at once.
Results are compared with torch's before anything is timed.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import fusednorm
import torch
from normserve.client import Client
from normserve.client.torch import LayerNorm
from torch import Tensor, nn

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.serve import command
from benchmarks.serve.callers.call_timing import time_calls_s
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.servers import server_processes

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26, "256 MiB": 2**28}
COLUMNS = ("what", "caller", "nbytes", "round", "calls", "per_second", "p50_us", "p99_us", "bytes_per_second")
_COLS = 1024
_MOST_OVER_HTTP = 2**26
MODULES = {1: "module", 16: "16 modules in a row"}
_MODULE_ROWS, _MODULE_COLS = 16, 4096
_QUOTA = 2**33
_WARM_CALLS, _WARM_S = 300, 1.5

Call = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each caller")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--cores", nargs=2, default=("0-3", "4-15"), help="of the server and of the callers")
    asked = parser.parse_args()
    results = CsvResults(asked.out, COLUMNS, asked.commit)
    with tempfile.TemporaryDirectory() as folder:
        measure(results, Path(folder), asked)
    print(format_table(results.rows))
    return results.exit_code


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each measurement, caller and round."""
    server_cores, caller_cores = map(command.parse_cores, asked.cores)
    shared = folder / "local.sock"
    quotas = ("--local-bytes", str(_QUOTA), "--local-device-bytes", str(_QUOTA))
    options = ("--local", str(shared), *quotas)
    with server_processes.run_normserve(
        server_cores, folder, checked_requests.make_parameters(), "triton", options
    ) as (tcp, _):
        os.sched_setaffinity(0, caller_cores)
        local, http = f"unix://{shared}", f"http://127.0.0.1:{tcp.address}"
        for size, nbytes in SIZES.items():
            with results.run_part(size), Client(local) as client, Client(http) as over_http:
                time_calls(results, size, nbytes, _make_forward_calls(client, over_http, nbytes), asked)
        for count, what in MODULES.items():
            with results.run_part(what), Client(local) as client:
                nbytes = 2 * _MODULE_ROWS * _MODULE_COLS
                time_calls(
                    results, f"{what}, forward and backward", nbytes, _make_module_steps(client, count), asked
                )
        for count, size, device in ((8, "4 KiB", "cuda"), (8, "4 KiB", None), (4, "64 MiB", None)):
            with results.run_part(f"{count} clients"):
                _time_clients(results, local, (count, size, device), asked)
        with results.run_part("copies"):
            time_calls(results, "copies both ways, 64 MiB", 2**26, {"pinned memory": _make_copies(2**26)}, asked)


def _make_forward_calls(client: Client, over_http: Client, nbytes: int) -> dict[str, Call]:
    shape = (nbytes // 4 // _COLS, _COLS)
    on_device = client.empty(shape, torch.float32, device="cuda").normal_()
    on_host = client.empty(shape, torch.float32).copy_(on_device)
    elsewhere, pageable, copy = on_device.clone(), on_host.clone(), torch.empty_like(on_device)
    right = nn.functional.layer_norm(on_device, (_COLS,))
    norm = nn.functional.layer_norm
    for x in (on_device, on_host, elsewhere, pageable):
        torch.testing.assert_close(client.layer_norm(x).y.cuda(), right, rtol=1e-5, atol=3e-5)
    calls: dict[str, Call] = {
        "device memory": lambda: client.layer_norm(on_device).y,
        "device memory, x elsewhere": lambda: client.layer_norm(elsewhere).y,
        "host memory": lambda: client.layer_norm(on_host).y,
        "host memory, x elsewhere": lambda: client.layer_norm(pageable).y,
        "torch in process": _synchronise_after(lambda: norm(elsewhere, (_COLS,))),
        "fusednorm in process": _synchronise_after(lambda: fusednorm.layer_norm(elsewhere)),
        "copy on the device": _synchronise_after(lambda: copy.copy_(elsewhere)),
    }
    if nbytes <= _MOST_OVER_HTTP:
        array = on_host.numpy()
        calls["HTTP"] = lambda: over_http.layer_norm(array).y
    return calls


def _make_module_steps(client: Client, count: int) -> dict[str, Call]:
    shape = (_MODULE_ROWS, _MODULE_COLS)
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    there, elsewhere, own, of_torch = (
        nn.Sequential(*(make(_MODULE_COLS, **like) for _ in range(count)))
        for make in (
            functools.partial(LayerNorm, client=client),
            functools.partial(LayerNorm, client=client),
            fusednorm.LayerNorm,
            nn.LayerNorm,
        )
    )
    for parameter in there.parameters():
        place = client.empty(parameter.shape, torch.bfloat16, device="cuda")
        parameter.data = place.copy_(parameter.data)
    x, dy = (client.empty(shape, torch.bfloat16, device="cuda").normal_() for _ in range(2))
    steps = {
        "device memory": _make_step(there, x, dy),
        "device memory, autograd on one thread": _disable_autograd_threads(_make_step(there, x, dy)),
        "device memory, tensors elsewhere": _make_step(elsewhere, x.clone(), dy.clone()),
        "fusednorm in process": _make_step(own, x.clone(), dy.clone()),
        "torch in process": _make_step(of_torch, x.clone(), dy.clone()),
    }
    right = steps["torch in process"]()
    for step in steps.values():
        for got, expected in zip(step(), right, strict=True):
            torch.testing.assert_close(got.float(), expected.float(), rtol=5e-2, atol=2e-1)
    return dict(steps)


def _make_step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Sequence[Tensor]]:
    x = x.requires_grad_()
    inputs = [x, *module.parameters()]

    def run_step() -> Sequence[Tensor]:
        found = torch.autograd.grad(module(x), inputs, dy)
        torch.cuda.synchronize()
        return found

    return run_step


def _disable_autograd_threads(step: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """With the backward pass on the calling thread, not on autograd's own."""

    def run() -> Sequence[Tensor]:
        with torch.autograd.set_multithreading_enabled(False):
            return step()

    return run


def _synchronise_after(call: Call) -> Call:
    def complete() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    return complete


def _make_copies(nbytes: int) -> Call:
    """Copies to the device and back at the same time, in pinned memory."""
    host = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)
        torch.cuda.synchronize()

    return copy


def time_calls(
    results: CsvResults, what: str, nbytes: int, calls: Mapping[str, Call], asked: argparse.Namespace
) -> None:
    """Time the calls in turns; a row for each turn.

    Args: nbytes: of x.
    """
    for number in range(asked.rounds):
        for caller, call in calls.items():
            _call_until_replayed(call)
            taken = time_calls_s(call, asked.seconds)
            _add_row(results, what, caller, nbytes, number, taken, len(taken) / sum(taken))


def _call_until_replayed(call: Call) -> None:
    """Call until the server replays such calls, as it does with what comes again and again."""
    ended = time.perf_counter() + _WARM_S
    for _ in range(_WARM_CALLS):
        call()
        if time.perf_counter() > ended:
            return


def _add_row(
    results: CsvResults, what: str, caller: str, nbytes: int, number: int, taken: list[float], rate: float
) -> None:
    ordered = sorted(taken)
    results.add_row(
        {
            "what": what,
            "caller": caller,
            "nbytes": nbytes,
            "round": number,
            "calls": len(taken),
            "per_second": f"{rate:.5g}",
            "p50_us": f"{1e6 * median(ordered):.4g}",
            "p99_us": f"{1e6 * ordered[int(0.99 * len(ordered))]:.4g}",
            "bytes_per_second": f"{2 * nbytes * rate:.4g}",
        }
    )


def _time_clients(
    results: CsvResults, url: str, load: tuple[int, str, str | None], asked: argparse.Namespace
) -> None:
    count, size, device = load
    context = multiprocessing.get_context("spawn")
    for number in range(asked.rounds):
        with contextlib.ExitStack() as stack:
            begin, ready = context.Event(), context.SimpleQueue()
            arguments = (url, SIZES[size], device, begin, ready, 2 * asked.seconds)
            processes = [context.Process(target=_run_client, args=arguments) for _ in range(count)]
            for process in processes:
                process.start()
                stack.callback(process.kill)
            for _ in processes:
                ready.get()
            begin.set()
            taken = [ready.get() for _ in processes]
            for process in processes:
                process.join()
        rate = sum(len(each) / sum(each) for each in taken)
        caller = "device memory" if device else "host memory"
        _add_row(
            results, f"{count} clients of {size}", caller, SIZES[size], number, [*itertools.chain(*taken)], rate
        )


def _run_client(url: str, nbytes: int, device: str | None, begin: Event, ready: Any, seconds: float) -> None:
    with Client(url) as client:
        x = client.empty((nbytes // 4 // _COLS, _COLS), torch.float32, device=device)
        x.normal_()
        _call_until_replayed(lambda: client.layer_norm(x).y)
        ready.put("ready")
        begin.wait()
        ready.put(time_calls_s(lambda: client.layer_norm(x).y, seconds))


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each measurement and caller: medians of the rounds."""
    lines = [
        "| what | caller | p50, µs | p99, µs | calls a second | GB/s, in and out |",
        "|---|---|---|---|---|---|",
    ]
    for what, caller in dict.fromkeys((row["what"], row["caller"]) for row in rows):
        cells = list(_iterate_medians([row for row in rows if (row["what"], row["caller"]) == (what, caller)]))
        lines.append(f"| {what} | {caller} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _iterate_medians(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for column, scale in (("p50_us", 1.0), ("p99_us", 1.0), ("per_second", 1.0), ("bytes_per_second", 1e-9)):
        yield f"{scale * median(float(row[column]) for row in rows):.4g}"


if __name__ == "__main__":
    sys.exit(main())
