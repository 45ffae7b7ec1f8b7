"""Drive normserve and other servers with the same load: `python -m benchmarks.peers --out FILE.csv`.

Closed loops of LayerNorm over float32 rows of 1024 with parameters that the server holds, npy in and out (Triton
uses its own protocol), on one connection and on eight.  By default servers are on one core and the client on
another.  In each round each server has a turn, in a changing order, while the others are stopped; results are
medians over the rounds.  Responses are compared with torch's.  A server whose package is not installed is skipped
with a message; incompatible packages can be in separate environments: `--python pytriton=/path/to/bin/python`.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from normload.adapters.row_adapters import make_parameters
from normload.load.request_cases import RequestCase
from normload.load.scenarios import LoadPhase, LoadScenario
from normload.load.workload import Workload
from normload.load_run import TargetServer, run_scenario
from normload.measurements.results import RunResult
from normserve.client import DType

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.peers.peer_servers import OTHERS, RunningServer, run_peer
from benchmarks.peers.table import OURS, format_table
from benchmarks.serve import command
from benchmarks.serve.servers import server_processes

COLS = 1024
SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24}
CONNECTIONS = (1, 8)
COLUMNS = (
    *("size", "connections", "server", "round"),
    *("per_second", "p50_ms", "p99_ms", "bytes_per_second", "errors", "wrong"),
)
_WARMUP_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server at each size (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="at each number of connections (%(default)s)")
    parser.add_argument(
        "--cores", nargs=2, default=("0", "1"), help="of the servers and of the client, as in 0-7 8"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of every server")
    parser.add_argument(
        "--python", type=_parse_interpreter, action="append", default=[], help="PACKAGE=INTERPRETER"
    )
    asked = parser.parse_args()
    server_cores, client_cores = map(command.parse_cores, asked.cores)
    results = CsvResults(asked.out, COLUMNS, asked.commit)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = _start_servers(stack, Path(folder), server_cores, asked.device, dict(asked.python))
        os.sched_setaffinity(0, client_cores)
        for row in measure_servers(running, asked.rounds, asked.seconds, len(client_cores)):
            results.add_row(row)
    print(format_table(results.rows))


def measure_servers(
    running: Mapping[str, RunningServer], rounds: int, seconds: float, processes: int
) -> Iterator[dict[str, object]]:
    """Run everything; a row for each server, size, number of connections and round."""
    for size, nbytes in SIZES.items():
        for number in range(rounds):
            turns = list(running.items())
            random.Random(number).shuffle(turns)
            for name, server in turns:
                server.resume()
                result = run_scenario(make_scenario(nbytes, seconds), server.target, seed=0, processes=processes)
                server.suspend()
                for row in _make_rows(result):
                    yield {"size": size, "server": name, "round": number} | row
        print(f"{size}: done", flush=True)


def make_scenario(nbytes: int, seconds: float) -> LoadScenario:
    """Closed loops with x of `nbytes`."""
    case = RequestCase("layer_norm", (nbytes // 4 // COLS, COLS), DType.FLOAT32)
    phases = tuple(LoadPhase(str(count), "closed", seconds, connections=count) for count in CONNECTIONS)
    workload = Workload(cases=((case, 1.0),))
    return LoadScenario("peers", "", workload, phases, connections=max(CONNECTIONS), warmup_s=_WARMUP_S)


def _make_rows(result: RunResult) -> Iterator[dict[str, object]]:
    for part in result.summarise_phases():
        latency = part.total.latency
        yield {
            "connections": part.name,
            "per_second": f"{part.rate:.2f}",
            "p50_ms": f"{latency.compute_percentile_s(50) * 1e3:.3f}",
            "p99_ms": f"{latency.compute_percentile_s(99) * 1e3:.3f}",
            "bytes_per_second": f"{part.bytes_per_second:.0f}",
            "errors": part.total.errors,
            "wrong": result.wrong,
        }


def _start_servers(
    stack: contextlib.ExitStack, folder: Path, cores: set[int], device: str, interpreters: Mapping[str, str]
) -> dict[str, RunningServer]:
    """Start the installed servers; each is stopped until its turn."""
    ((case, _),) = make_scenario(SIZES["4 KiB"], 1.0).workload.draw_cases(0)
    held = make_parameters(case)
    file = folder / "parameters.npz"
    np.savez(file, weight=held["weight"], bias=held["bias"])
    ours, _ = stack.enter_context(
        server_processes.run_normserve(cores, folder, held, "triton" if device == "cuda" else "torch")
    )
    (plain,) = stack.enter_context(server_processes.run_plain(cores, folder, held, device))
    running = {
        name: RunningServer(TargetServer(f"http://127.0.0.1:{served.address}{served.path}", "npy"), served.pid)
        for name, served in ((OURS, ours), (plain.name, plain))
    }
    for name, each in OTHERS.items():
        interpreter = interpreters.get(each.package, sys.executable)
        if _is_installed(each.package, interpreter):
            running[name] = stack.enter_context(run_peer(each, interpreter, cores, file, device))
        else:
            print(f"{name} is left out: {interpreter} has no {each.package}", flush=True)
    for server in running.values():
        server.suspend()
        # Stopped processes could not end with the run.
        stack.callback(server.resume)
    return running


def _is_installed(package: str, interpreter: str) -> bool:
    looked = [interpreter, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"]
    return subprocess.run(looked, check=False).returncode == 0


def _parse_interpreter(text: str) -> tuple[str, str]:
    package, _, interpreter = text.partition("=")
    if package not in {each.package for each in OTHERS.values()} or not interpreter:
        raise argparse.ArgumentTypeError(f"must be PACKAGE=INTERPRETER, got {text!r}")
    return package, interpreter


if __name__ == "__main__":
    main()
