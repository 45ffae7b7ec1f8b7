"""Time saved by one request instead of several: `python -m benchmarks.serve.callers.operations --out FILE.csv`.

It needs a GPU.  A server with Triton's kernels and a caller in a separate process; x is bfloat16 [rows, 4096] with
float32 parameters.  Whole calls over device memory and over HTTP: a chain of three LayerNorms against three
requests, each with the previous one's y as input; float8 results against bfloat16 ones; eight tensors in one
request against one request each.  The results of both are compared before anything is timed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from normserve.client import Client
from torch import Tensor

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.serve import command
from benchmarks.serve.callers.device import COLUMNS, Call, format_table, time_calls
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.servers import server_processes

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "64 MiB": 2**26}
_COLS = 4096
_NORMS, _TENSORS = 3, 8
_QUOTA = 2**33


def main() -> int:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each caller")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--cores", nargs=2, default=("0-3", "4-15"), help="of the server and of the caller")
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
        urls = {"device memory": f"unix://{shared}", "HTTP": f"http://127.0.0.1:{tcp.address}"}
        for size, nbytes in SIZES.items():
            for transport, url in urls.items():
                with results.run_part(f"{size}, {transport}"), Client(url) as client:
                    device = "cuda" if transport == "device memory" else None
                    for what, calls in _iterate_calls(client, nbytes, device):
                        time_calls(results, f"{what}, {size}, {transport}", nbytes, calls, asked)


def _iterate_calls(client: Client, nbytes: int, device: str | None) -> Iterator[tuple[str, dict[str, Call]]]:
    def make_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor: Tensor = client.empty(shape, dtype, device=device)
        return tensor.copy_(torch.randn(shape))

    rows = nbytes // 2 // _COLS
    x = make_tensor(rows, _COLS, dtype=torch.bfloat16)
    weights, biases = ([make_tensor(_COLS) for _ in range(_NORMS)] for _ in range(2))

    def call_norms() -> Tensor:
        y = x
        for weight, bias in zip(weights, biases, strict=True):
            y = client.layer_norm(y, weight, bias).y
        return y

    def call_chain() -> Tensor:
        return client.layer_norm_chain(x, weights, biases).y

    # Three requests round three times.
    _check_close(call_chain(), call_norms(), 0.1)
    yield "chain of three", {"one request": call_chain, "three requests": call_norms}

    def narrow() -> Any:
        return client.layer_norm(x, weights[0], biases[0], out_dtype="float8_e4m3fn")

    def call_norm() -> Tensor:
        return client.layer_norm(x, weights[0], biases[0]).y

    result = narrow()
    _check_close(result.y.float() * result.scale[:, None], call_norm(), 0.3)
    yield "out_dtype", {"float8_e4m3fn with scales": narrow, "bfloat16": call_norm}

    step = max(1, rows // _TENSORS)
    several = [make_tensor(step, _COLS, dtype=torch.bfloat16) for _ in range(_TENSORS)]

    def call_with_list() -> list[Tensor]:
        return client.layer_norm(several, weights[0], biases[0]).y

    def call_each() -> list[Tensor]:
        return [client.layer_norm(one, weights[0], biases[0]).y for one in several]

    _check_close(torch.cat(call_with_list()), torch.cat(call_each()), 0.0)
    yield "eight tensors", {"one request": call_with_list, "eight requests": call_each}


def _check_close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    sys.exit(main())
