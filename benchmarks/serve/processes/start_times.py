"""Time of a server's start: `python -m benchmarks.serve.processes.start_times --backend triton --out FILE.csv`.

In each round a server is started with an empty kernel cache, then with the cache of that start.  Times are measured
from before the process is created: until its first response, until it is ready, and until it has answered a
request.  Then the first and second request of a class that no setting names: with an empty cache its kernels are
compiled, with a full one they are loaded.  The server's log, on stderr, has the time that it waited for compilers.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from normserve.codec import safetensors
from normserve.memory.tensors import DType, HostTensor

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.serve import command
from benchmarks.serve.servers.server_processes import run_process

COLUMNS = ("cache", "round", "what", "ms", "kernels_in_cache")
_LATEST_S = 420.0
_POLL_S = 0.005
_SAFETENSORS = "application/x-safetensors"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One request of random float32 tensors."""

    what: str
    path: str
    shapes: Mapping[str, tuple[int, ...]]

    def encode_body(self) -> bytes:
        """The body, as safetensors."""
        numbers = np.random.default_rng(0)
        tensors = {}
        for name, shape in self.shapes.items():
            array = numbers.standard_normal(shape, dtype=np.float32)
            tensors[name] = HostTensor(DType.FLOAT32, shape, array.data.cast("B"))
        return b"".join(safetensors.encode(tensors))


FORESEEN = StartRequest("foreseen", "/v1/layer_norm", {"x": (8, 1024), "weight": (1024,), "bias": (1024,)})
UNFORESEEN = (
    StartRequest("layer_norm of 1280", "/v1/layer_norm", {"x": (8, 1280), "weight": (1280,), "bias": (1280,)}),
    StartRequest("layer_norm with silu", "/v1/layer_norm?activation=silu", {"x": (8, 1024), "weight": (1024,)}),
    StartRequest("rms_norm of 8192, residual", "/v1/rms_norm", dict.fromkeys(("x", "residual"), (8, 8192))),
    StartRequest(
        "layer_norm backward of 1280",
        "/v1/layer_norm/backward",
        {"x": (8, 1280), "dy": (8, 1280), "weight": (1280,), "bias": (1280,)},
    ),
    StartRequest(
        "group_norm nhwc with silu",
        "/v1/group_norm?num_groups=32&layout=nhwc&activation=silu",
        {"x": (2, 16, 16, 320), "weight": (320,), "bias": (320,)},
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--backend", default="torch", help="torch or triton")
    parser.add_argument("--rounds", type=int, default=3, help="starts with an empty cache, and with a full one")
    parser.add_argument("--cores", help="of the server, as in 0-15; all if not given")
    asked = parser.parse_args()
    results = CsvResults(asked.out, COLUMNS, asked.commit)
    cores = command.parse_cores(asked.cores) if asked.cores else os.sched_getaffinity(0)
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "full"):
                with results.run_part(f"{cache} cache"):
                    for what, seconds in _measure_start(asked.backend, cores, Path(folder)):
                        kernels = len(list(Path(folder).glob("*/*.cubin")))
                        about = {"cache": cache, "round": number, "kernels_in_cache": kernels}
                        results.add_row(about | {"what": what, "ms": f"{1000 * seconds:.1f}"})
    for line in format_table(results.rows):
        print(line)
    return results.exit_code


def format_table(rows: list[Mapping[str, object]]) -> list[str]:
    """Medians of the rounds, a line for each measured time."""
    times: dict[tuple[object, object], list[float]] = {}
    for row in rows:
        times.setdefault((row["cache"], row["what"]), []).append(float(str(row["ms"])))
    return [
        f"{cache} cache, {what}: {median(each):.0f} ms ({min(each):.0f} to {max(each):.0f})"
        for (cache, what), each in times.items()
    ]


def _measure_start(backend: str, cores: set[int], cache: Path) -> Iterator[tuple[str, float]]:
    """The names of one server's measured times, and their seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "normserve", "serve", "--port", str(port), "--backend", backend]
    began = time.perf_counter()
    environment = {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    with (
        run_process(command, cores, environment) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_LATEST_S) as http,
    ):
        _wait_for_ok(http, "/livez", running, began)
        yield "listens", time.perf_counter() - began
        _wait_for_ok(http, "/readyz", running, began)
        yield "ready", time.perf_counter() - began
        _send_request(http, FORESEEN)
        yield "answered", time.perf_counter() - began
        for request in (FORESEEN, *UNFORESEEN):
            for which in ("first", "second"):
                asked = time.perf_counter()
                _send_request(http, request)
                yield f"{request.what}, {which} answer", time.perf_counter() - asked


def _wait_for_ok(http: httpx.Client, path: str, running: subprocess.Popen[str], began: float) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if http.get(path).status_code == httpx.codes.OK:
                return
        if running.poll() is not None or time.perf_counter() - began > _LATEST_S:
            raise RuntimeError(f"the server does not answer {path} with 200")
        time.sleep(_POLL_S)


def _send_request(http: httpx.Client, request: StartRequest) -> None:
    answer = http.post(request.path, content=request.encode_body(), headers={"content-type": _SAFETENSORS})
    answer.raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
