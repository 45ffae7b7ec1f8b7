"""Savings by one server for many processes: `python -m benchmarks.serve.processes.many --out FILE.csv`.

1, 4 and 16 processes normalise, either all through one server, which shares its memory with each, or each with its
own kernels (and on a GPU its own CUDA context).  The workload is LayerNorm forward of [rows, 1024] float32 in
complete calls.  Measured are rates and latencies with all processes active, the time from a process's start to its
first result, the memory of all processes including the server, and the effect on the others when one is killed.

Then the server's latencies for one client are measured while another process keeps the device, or a core, busy
with its own kernels.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.command import SIZES
from benchmarks.serve.servers import server_processes

SHARED, DEVICE, OWN, BESIDE = "host memory", "device memory", "kernels of their own", "busy neighbour"
COLUMNS = (
    *("size", "nbytes", "clients", "caller", "round", "calls", "per_second", "p50_us", "p99_us"),
    *("first_answer_s", "resident_bytes", "device_bytes", "killed_errors", "killed_worst_us"),
)
_QUOTA = 2**33
# Seconds before and after the kill of a process.
_BEFORE_KILL_S, _AFTER_KILL_S = 0.3, 1.0


def main() -> int:
    options = command.make_parser("the server and of its clients; processes with kernels of their own have both")
    command.add_size_option(options)
    command.add_turn_options(options, "each number of processes", 2.0, rounds=3)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="how many at once")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the kernels run")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each size, number of clients, caller and round."""
    server_cores, client_cores = asked.cores
    before = read_device_bytes() if asked.device == "cuda" else 0
    shared = folder / "many.sock"
    quotas = ("--local-bytes", str(_QUOTA), "--local-device-bytes", str(_QUOTA))
    backend = "triton" if asked.device == "cuda" else "torch"
    for size, count in itertools.product(asked.size or ["4 KiB", "1 MiB"], asked.clients):
        load = _ProcessLoad(size, count, asked, before)
        with results.run_part(f"{OWN}, {count} of {size}"):
            for number in range(asked.rounds):
                results.add_row(
                    load.measure_row(OWN, number, server_cores | client_cores, f"own {asked.device}", None)
                )
    with server_processes.run_normserve(
        server_cores, folder, checked_requests.make_parameters(), backend, ("--local", str(shared), *quotas)
    ) as (served, _):
        callers = {SHARED: f"unix://{shared}"}
        if asked.device == "cuda":
            callers[DEVICE] = f"unix://{shared}#device"
        for size, count in itertools.product(asked.size or ["4 KiB", "1 MiB"], asked.clients):
            load = _ProcessLoad(size, count, asked, before)
            for caller, where in callers.items():
                with results.run_part(f"{caller}, {count} of {size}"):
                    for number in range(asked.rounds):
                        results.add_row(load.measure_row(caller, number, client_cores, where, served.pid))
        for size, (caller, where) in itertools.product(asked.size or ["4 KiB", "1 MiB"], callers.items()):
            with results.run_part(f"{BESIDE}, {size}"), _occupy(client_cores, asked.device):
                load = _ProcessLoad(size, 1, asked, before)
                for number in range(asked.rounds):
                    results.add_row(load.measure_row(caller, number, client_cores, where, served.pid, BESIDE))


class _ProcessLoad:
    """A number of processes with tensors of one size."""

    def __init__(self, size: str, count: int, asked: argparse.Namespace, device_before: int) -> None:
        self._size, self._count, self._asked = size, count, asked
        self._device_before = device_before

    def measure_row(
        self, caller: str, number: int, cores: set[int], where: str, server: int | None, beside: str = ""
    ) -> Mapping[str, object]:
        """Start the processes, let them work, kill one, and return the measurements."""
        with contextlib.ExitStack() as stack:
            clients = [_NormalisingProcess(cores, where, SIZES[self._size]) for _ in range(self._count)]
            for client in clients:
                stack.callback(client.end)
            first = [client.wait_until_ready() for client in clients]
            taken = _run_turn(clients, self._asked.seconds)
            pids = [client.pid for client in clients] + ([] if server is None else [server])
            resident = read_resident_bytes(pids)
            on_device = read_device_bytes() - self._device_before if self._asked.device == "cuda" else 0
            killed = _measure_kill(clients) if self._count > 1 else ("", "")
        seconds = sorted(each for one in taken for _, each in one["calls"])
        assert not any(one["errors"] for one in taken), "calls failed that nobody disturbed"
        return {
            "size": self._size,
            "nbytes": SIZES[self._size],
            "clients": self._count,
            "caller": f"{caller}, {beside}" if beside else caller,
            "round": number,
            "calls": len(seconds),
            "per_second": f"{sum(_compute_rate(one) for one in taken):.5g}",
            "p50_us": f"{1e6 * median(seconds):.4g}",
            "p99_us": f"{1e6 * seconds[int(0.99 * len(seconds))]:.4g}",
            "first_answer_s": f"{median(first):.3g}",
            "resident_bytes": resident,
            "device_bytes": on_device,
            "killed_errors": killed[0],
            "killed_worst_us": killed[1],
        }


class _NormalisingProcess:
    """One of the processes that normalise."""

    def __init__(self, cores: set[int], where: str, nbytes: int) -> None:
        module = "benchmarks.serve.clients.normalising_process"
        arguments = [sys.executable, "-m", module, where, str(nbytes), ",".join(map(str, cores))]
        self._began = time.perf_counter()
        self._running = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._running.pid

    def wait_until_ready(self) -> float:
        """Wait for its first result; return the seconds since its start."""
        answered: float = self._receive()
        return answered - self._began

    def start_turn(self, until: float) -> None:
        """Let it work until this time, by `time.perf_counter`."""
        assert self._running.stdin is not None
        self._running.stdin.write(f"{until}\n")
        self._running.stdin.flush()

    def receive_calls(self) -> Mapping[str, Any]:
        """The result of `normalising_process.call_until`."""
        taken: Mapping[str, Any] = self._receive()
        return taken

    def kill(self) -> None:
        self._running.kill()

    def end(self) -> None:
        self._running.kill()
        self._running.communicate()

    def _receive(self) -> Any:
        assert self._running.stdout is not None
        line = self._running.stdout.readline()
        if not line:
            raise RuntimeError("a process that normalises has ended")
        return json.loads(line)


def _run_turn(clients: Sequence[_NormalisingProcess], seconds: float) -> list[Mapping[str, Any]]:
    until = time.perf_counter() + seconds
    for client in clients:
        client.start_turn(until)
    return [client.receive_calls() for client in clients]


def _compute_rate(one: Mapping[str, Any]) -> float:
    """Calls per second."""
    calls = one["calls"]
    return float(len(calls) / sum(seconds for _, seconds in calls))


def _measure_kill(clients: Sequence[_NormalisingProcess]) -> tuple[int, str]:
    """Errors of the others, and their longest call in the second after a process's death."""
    first, *others = clients
    began = time.perf_counter()
    for client in clients:
        client.start_turn(began + _BEFORE_KILL_S + _AFTER_KILL_S)
    time.sleep(_BEFORE_KILL_S)
    killed_at = time.perf_counter()
    first.kill()
    taken = [client.receive_calls() for client in others]
    after = [seconds for one in taken for ended, seconds in one["calls"] if ended >= killed_at]
    return sum(one["errors"] for one in taken), f"{1e6 * max(after):.4g}"


def read_resident_bytes(pids: Sequence[int]) -> int:
    """Host memory of all processes together; memory that several share counts once."""
    kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return 1024 * kib


def read_device_bytes() -> int:
    """Used memory of the first GPU, by all processes."""
    arguments = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(said.stdout) * 2**20


@contextlib.contextmanager
def _occupy(cores: set[int], device: str) -> Iterator[None]:
    """A process that computes without end."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_compute_endlessly, args=(ready, cores, device), daemon=True)
    process.start()
    try:
        ready.wait()
        yield
    finally:
        process.kill()
        process.join()


def _compute_endlessly(ready: Any, cores: set[int], device: str) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    a = torch.randn(4096 if device == "cuda" else 256, 4096, device=device)
    while True:
        (a @ a.T).sum().item()
        ready.set()


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each size, number of clients and caller: medians of the rounds."""
    lines = [
        "| size | clients | caller | p50, µs | p99, µs | calls a second | first answer, s | resident, MiB |"
        " on the device, MiB | errors when one is killed | worst then, µs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    columns = {"p50_us": 1.0, "p99_us": 1.0, "per_second": 1.0, "first_answer_s": 1.0}
    columns |= {"resident_bytes": 2.0**-20, "device_bytes": 2.0**-20, "killed_errors": 1.0, "killed_worst_us": 1.0}
    keys = ("size", "clients", "caller")
    for key in dict.fromkeys(tuple(str(row[name]) for name in keys) for row in rows):
        of = [row for row in rows if tuple(str(row[name]) for name in keys) == key]
        cells = []
        for column, scale in columns.items():
            known = [float(str(row[column])) for row in of if row[column] != ""]
            cells.append(f"{scale * median(known):.4g}" if known else "")
        lines.append(f"| {' | '.join(key)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
