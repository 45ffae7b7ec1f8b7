"""Effect of the device and of batching on small requests: `python -m benchmarks.serve.small_requests --out
FILE.csv`.

LayerNorm of one row of 4096 bfloat16 with a registered layer, safetensors in and out, sent by one connection and by
64 at once.  normserve with default settings, normserve without batching, and the same server with a device that
returns at once (`deviceless`) have turns in each round.  If 64 connections get no more responses from the last one,
HTTP is the limit and not the device.
"""

import argparse
import contextlib
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import torch
from normserve.codec import safetensors
from normserve.memory.tensors import DType, HostTensor

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.clients.c_client import ClosedLoopTimes, CompiledClient
from benchmarks.serve.servers import server_metrics, server_processes
from benchmarks.serve.servers.server_processes import ServerProcess

COLS = 4096
COLUMNS = (
    *("connections", "server", "round", "per_second", "p50_ms", "requests_a_launch", "client_cores"),
    *("rate_over_unbatched", "rate_over_deviceless", "p50_over_deviceless"),
)
_SAFETENSORS = "application/x-safetensors"
# For values up to about ten, rounded to eight bits.
_TOLERANCE = 2e-2


def main() -> int:
    options = command.make_parser("the servers and of the client")
    options.add_argument("--backend", default="torch", help="of the servers with a device: torch or triton")
    options.add_argument("--connections", type=int, nargs="+", default=(1, 64))
    command.add_turn_options(options, "each server", 1.5)
    return command.run_command(options.parse_args(), COLUMNS, measure)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each number of connections, server and round."""
    server_cores, client_cores = asked.cores
    with contextlib.ExitStack() as stack:
        client = CompiledClient(folder, client_cores)
        served = _start_servers(stack, folder, server_cores, asked.backend)
        body = make_request_body()
        for connections in asked.connections:
            with results.run_part(f"{connections} connections"):
                _measure_connections(results, client, served, body, connections, asked.rounds, asked.seconds)


def make_request_body() -> bytes:
    """One row, as safetensors."""
    x = torch.randn(1, COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = x.view(torch.uint8).flatten().numpy().data
    return b"".join(safetensors.encode({"x": HostTensor(DType.BFLOAT16, (1, COLS), data)}))


def check_response(body: bytes, parameters: Mapping[str, np.ndarray], answer: bytes) -> None:
    """Raises: AssertionError: the response is not LayerNorm of the request's row."""
    x, y = (_decode_row(payload, name) for payload, name in ((body, "x"), (answer, "y")))
    right = checked_requests.compute_expected(x.float().numpy(), parameters)
    torch.testing.assert_close(y.double(), right, rtol=_TOLERANCE, atol=_TOLERANCE)


def _decode_row(payload: bytes, name: str) -> torch.Tensor:
    tensor = safetensors.decode(memoryview(payload))[name]
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape)


def _start_servers(stack: contextlib.ExitStack, folder: Path, cores: set[int], backend: str) -> list[ServerProcess]:
    parameters, body = checked_requests.make_parameters(COLS), make_request_body()
    served = []
    for name, options in (("normserve", ()), ("unbatched", ("--max-batch-requests", "1"))):
        own = folder / name
        own.mkdir()
        over_tcp, _ = stack.enter_context(server_processes.run_normserve(cores, own, parameters, backend, options))
        served.append(replace(over_tcp, name=name))
        url = f"http://127.0.0.1:{over_tcp.address}{over_tcp.path}"
        answer = httpx.post(url, content=body, headers={"content-type": _SAFETENSORS}, timeout=300)
        check_response(body, parameters, answer.raise_for_status().content)
    return [*served, stack.enter_context(server_processes.run_deviceless(cores, parameters))]


def _measure_connections(
    results: CsvResults,
    client: CompiledClient,
    served: list[ServerProcess],
    body: bytes,
    connections: int,
    rounds: int,
    seconds: float,
) -> None:
    began = {server.name: server_metrics.fetch_samples(server.address) for server in served}
    first = len(results.rows)
    for number in range(rounds):
        turns, launches = {}, {}
        for server in random.Random(number).sample(served, len(served)):
            before = server_metrics.fetch_samples(server.address)
            turns[server.name] = client.run_turn(server, _SAFETENSORS, body, seconds, connections)
            launches[server.name] = server_metrics.compute_requests_per_launch(
                before, server_metrics.fetch_samples(server.address)
            )
        for name in turns:
            of_round = {"connections": connections, "server": name, "round": number}
            results.add_row(of_round | _make_figures(name, turns) | {"requests_a_launch": f"{launches[name]:.2f}"})
    for server in served:
        rows = [row for row in results.rows[first:] if row["server"] == server.name]
        print(f"{connections} connections, {server.name}: {_format_medians(rows)}")
        print(
            "  " + server_metrics.format_stages(began[server.name], server_metrics.fetch_samples(server.address)),
            flush=True,
        )


def _make_figures(name: str, turns: Mapping[str, ClosedLoopTimes]) -> dict[str, object]:
    own, unbatched, deviceless = turns[name], turns["unbatched"], turns["deviceless"]
    return {
        "per_second": f"{own.per_second:.1f}",
        "p50_ms": f"{own.p50_s * 1000:.4f}",
        "client_cores": f"{own.client_cores:.2f}",
        "rate_over_unbatched": f"{own.per_second / unbatched.per_second:.3f}",
        "rate_over_deviceless": f"{own.per_second / deviceless.per_second:.3f}",
        "p50_over_deviceless": f"{own.p50_s / deviceless.p50_s:.3f}",
    }


def _format_medians(rows: list[Mapping[str, object]]) -> str:
    """The medians of the rounds."""
    measures = [column for column in COLUMNS if column not in ("connections", "server", "round")]
    return ", ".join(f"{column} {median(float(str(row[column])) for row in rows):.4g}" for column in measures)


if __name__ == "__main__":
    sys.exit(main())
