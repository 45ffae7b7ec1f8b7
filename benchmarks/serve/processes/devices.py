"""Several devices against one: `python -m benchmarks.serve.processes.devices --devices 0,1 --out FILE.csv`.

First the engines alone, one process per device: the combined rate of all buses and kernels.  Then servers,
`normserve serve --devices 0` against all devices, with as many connections as necessary.  Each has a turn in each
round, in random order, and ratios are computed within a round.  The numbers of cores that the client and each
process kept busy show the limit: the client, if its number is near that of its cores; the accepting process
(`front`), if its number is near one.
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
import numpy as np

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.clients.c_client import CompiledClient
from benchmarks.serve.engine.engine_processes import start_engines
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.processor_time import read_processor_seconds
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = (
    *("what", "nbytes", "connections", "devices", "round", "bytes_per_second", "over_one"),
    *("per_second", "p50_ms", "client_cores", "server_cores"),
)
_ENGINE_MIB = (16, 64)
_IN_FLIGHT = 8
# Bytes of a request, and number of connections.
_REQUESTS = ((2**12, 64), (2**20, 32), (2**24, 16), (2**26, 8))


@dataclass(frozen=True, slots=True)
class _DeviceServer:
    """A server, its processes by name, and how many devices they own."""

    server: ServerProcess
    pids: dict[str, int]
    devices: int


def main() -> int:
    options = command.make_parser("the servers and of the client")
    options.add_argument("--devices", default="0,1", help="as of `normserve serve`; the first is the one alone")
    options.add_argument("--only", choices=("engine", "http"), help="one part of it")
    command.add_turn_options(options, "each", 1.5, rounds=5)
    return command.run_command(options.parse_args(), COLUMNS, measure)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each size, number of devices and round."""
    devices = asked.devices.split(",")
    if asked.only != "http":
        for mib in _ENGINE_MIB:
            with results.run_part(f"engines, {mib} MiB"):
                _measure_engines(results, devices, mib * 2**20, asked.rounds, asked.seconds)
    if asked.only != "engine":
        with results.run_part("servers"), contextlib.ExitStack() as stack:
            server_cores, client_cores = asked.cores
            client = CompiledClient(folder, client_cores)
            fleets = [
                _start_server(stack, folder / str(len(some)), some, server_cores) for some in (devices[:1], devices)
            ]
            for nbytes, connections in _REQUESTS:
                with results.run_part(f"servers, {nbytes} bytes"):
                    _measure_servers(results, client, fleets, nbytes, connections, asked.rounds, asked.seconds)


def _measure_engines(results: CsvResults, devices: list[str], nbytes: int, rounds: int, seconds: float) -> None:
    first = len(results.rows)
    with start_engines(devices, nbytes, _IN_FLIGHT) as all_of_them:
        for number in range(rounds):
            reached = {}
            for count in random.Random(number).sample((1, len(devices)), 2):
                for engine in all_of_them[:count]:
                    engine.start_turn(seconds)
                reached[count] = sum(engine.receive_rate() for engine in all_of_them[:count])
            for count, rate in sorted(reached.items()):
                results.add_row(
                    {
                        "what": "engine",
                        "nbytes": nbytes,
                        "connections": _IN_FLIGHT,
                        "devices": count,
                        "round": number,
                        "bytes_per_second": f"{rate:.0f}",
                        "over_one": f"{rate / reached[1]:.3f}",
                    }
                )
    _print_medians(f"engines, {nbytes >> 20} MiB", results.rows[first:])


def _start_server(stack: contextlib.ExitStack, folder: Path, devices: list[str], cores: set[int]) -> _DeviceServer:
    folder.mkdir()
    backend = "torch" if devices[0] == "cpu" else "triton"
    options = ("--devices", ",".join(devices))
    parameters = checked_requests.make_parameters()
    served, _ = stack.enter_context(server_processes.run_normserve(cores, folder, parameters, backend, options))
    told = httpx.get(f"http://127.0.0.1:{served.address}/v1/info", timeout=30).raise_for_status().json()
    pids = {"front": served.pid} | {f"process {each['index']}": each["pid"] for each in told["processes"]}
    return _DeviceServer(served, pids, len(devices))


def _measure_servers(
    results: CsvResults,
    client: CompiledClient,
    fleets: list[_DeviceServer],
    nbytes: int,
    connections: int,
    rounds: int,
    seconds: float,
) -> None:
    first = len(results.rows)
    x = checked_requests.make_x(nbytes)
    body = checked_requests.encode_npy(x)
    for fleet in fleets:
        _check_responses(fleet, x, body)
        # A first turn, to allocate slabs for this many requests.
        client.run_turn(fleet.server, "application/x-npy", body, seconds, connections)
    for number in range(rounds):
        turns = {}
        for fleet in random.Random(number).sample(fleets, len(fleets)):
            began, used = time.perf_counter(), read_processor_seconds(fleet.pids)
            turn = client.run_turn(fleet.server, "application/x-npy", body, seconds, connections)
            elapsed = time.perf_counter() - began
            busy = {name: (now - used[name]) / elapsed for name, now in read_processor_seconds(fleet.pids).items()}
            turns[fleet.devices] = turn, busy
        for count, (turn, busy) in sorted(turns.items()):
            results.add_row(
                {
                    "what": "server",
                    "nbytes": len(body),
                    "connections": connections,
                    "devices": count,
                    "round": number,
                    "bytes_per_second": f"{2 * len(body) * turn.per_second:.0f}",
                    "over_one": f"{turn.per_second / turns[1][0].per_second:.3f}",
                    "per_second": f"{turn.per_second:.1f}",
                    "p50_ms": f"{turn.p50_s * 1000:.3f}",
                    "client_cores": f"{turn.client_cores:.2f}",
                    "server_cores": ", ".join(f"{name} {cores:.2f}" for name, cores in busy.items()),
                }
            )
    _print_medians(f"servers, {nbytes} bytes, {connections} connections", results.rows[first:])


def _check_responses(fleet: _DeviceServer, x: np.ndarray, body: bytes) -> None:
    """Compare one response of each process with torch's; connections go to the processes in turn."""
    url = f"http://127.0.0.1:{fleet.server.address}{fleet.server.path}"
    for _ in range(fleet.devices):
        answer = httpx.post(url, content=body, headers={"content-type": "application/x-npy"}, timeout=60)
        checked_requests.check_response(x, checked_requests.make_parameters(), answer.raise_for_status().content)


def _print_medians(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    for count in dict.fromkeys(str(row["devices"]) for row in rows):
        own = [row for row in rows if str(row["devices"]) == count]
        rate, ratio = (median(float(str(row[name])) for row in own) for name in ("bytes_per_second", "over_one"))
        said = f"{title}, {count} devices: {rate / 1e9:.2f} GB/s, {ratio:.2f} of one"
        if "client_cores" in own[-1]:
            said += f"; cores: client {own[-1]['client_cores']}, {own[-1]['server_cores']}"
        print(said, flush=True)


if __name__ == "__main__":
    sys.exit(main())
