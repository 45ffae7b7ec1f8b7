"""Times fusednorm against its peers: correctness first, then speed, one CSV row a cell and provider.

    python -m benchmarks --suite first --out benchmarks/results/first.csv

A provider that is wrong is not timed.  `of_copy` is the fewest bytes of the pass over its time, as a fraction of
what a device-to-device copy of x reaches in the same run.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from fusednorm import reference
from torch import Tensor

from benchmarks.cells import SUITES, Cell
from benchmarks.providers import EPS, PROVIDERS, Call, Problem, copy
from benchmarks.timing import Quantiles, Timer

COLUMNS = (
    *("gpu", "driver", "torch", "triton", "commit", "dirty"),
    *("op", "pass", "variant", "shape", "dtype", "layout", "provider"),
    *("ms_p20", "ms_p50", "ms_p80", "gbps", "of_copy", "max_error"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=SUITES, help="what to time (default: first)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="comma-separated (default: all)")
    parser.add_argument("--commit", default="", help="recorded in the CSV; asked of git when empty")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this time")
    arguments = parser.parse_args()
    cells = [cell for suite in arguments.suite or ["first"] for cell in SUITES[suite]()]
    machine = _machine(arguments.commit)
    timer = Timer()
    began = time.monotonic()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for done, cell in enumerate(cells):
            if time.monotonic() - began > arguments.seconds:
                print(f"out of time after {done} of {len(cells)} cells", file=sys.stderr)
                break
            rows = time_cell(cell, arguments.providers.split(","), timer)
            writer.writerows(machine | row for row in rows)
            file.flush()
            summary = "  ".join(f"{row['provider']} {row['of_copy']}" for row in rows)
            name = f"{cell.op} {cell.pass_} {cell.variant} {cell.shape_name} {cell.dtype} {cell.layout}"
            print(f"[{done + 1}/{len(cells)}] {name}: {summary}", flush=True)


def time_cell(cell: Cell, providers: list[str], timer: Timer) -> list[dict[str, object]]:
    """Rows of the copy and of every provider that has the cell and computes it right."""
    problem = Problem(cell)
    exact = _exact(problem)
    copy_time = timer(copy(problem))
    roof = 2 * problem.x.nbytes / copy_time.p50
    rows = [_row(cell, "copy", copy_time, 2 * problem.x.nbytes, roof, 0.0)]
    for name in providers:
        try:
            call = PROVIDERS[name](problem)
            if call is None:
                continue
            error = _max_error(call, exact)
            if not error <= _tolerance(problem, exact):
                raise ValueError(f"wrong by {error:.3g}")
            rows.append(_row(cell, name, timer(call), problem.min_bytes, roof, error))
        except Exception as problem_of_provider:
            print(f"{name}: {cell}: {str(problem_of_provider)[:300]}", file=sys.stderr)
    return rows


def _exact(problem: Problem) -> Tensor:
    """The first result (y or dx) of a slice of the cell in float64, where the whole would not fit."""
    cell = problem.cell
    part = _first_part(problem.x)
    leading = (part, cell.groups) if cell.groups else (part,)
    parameters = (problem.weight,) if cell.op == "rms_norm" else (problem.weight, problem.bias)
    options = {
        "eps": EPS,
        "activation": cell.activation,
        "precision": torch.float64,
        "residual": None if problem.residual is None else _first_part(problem.residual),
    }
    if cell.pass_ == "forward":
        y: Tensor = getattr(reference, f"{cell.op}_forward")(
            *leading, *parameters, **options, out_dtype=torch.float64
        ).y
        return y
    dy = _first_part(problem.dy)
    wide = (leading[0].double(), *leading[1:])
    dx: Tensor = getattr(reference, f"{cell.op}_backward")(dy.double(), *wide, *parameters, **options).dx
    return dx


def _first_part(tensor: Tensor) -> Tensor:
    """The first rows or samples, 2^24 elements at most and one row or sample at least."""
    return tensor[: max(1, 2**24 // (tensor.numel() // tensor.shape[0]))]


def _max_error(call: Call, exact: Tensor) -> float:
    result = call()[0]
    return float((result[: exact.shape[0]].double() - exact).abs().max())


def _tolerance(problem: Problem, exact: Tensor) -> float:
    """Rounding to the output's dtype, with room for a peer that rounds in between."""
    return 8 * torch.finfo(problem.dtype).eps * max(1.0, float(exact.abs().max()))


def _row(
    cell: Cell, provider: str, time_ms: Quantiles, nbytes: int, roof: float, error: float
) -> dict[str, object]:
    return {
        "op": cell.op,
        "pass": cell.pass_,
        "variant": cell.variant,
        "shape": cell.shape_name,
        "dtype": cell.dtype,
        "layout": cell.layout,
        "provider": provider,
        "ms_p20": f"{time_ms.p20:.5f}",
        "ms_p50": f"{time_ms.p50:.5f}",
        "ms_p80": f"{time_ms.p80:.5f}",
        "gbps": f"{nbytes / time_ms.p50 / 1e6:.0f}",
        "of_copy": f"{nbytes / time_ms.p50 / roof:.3f}",
        "max_error": f"{error:.3g}",
    }


def _machine(commit: str) -> dict[str, object]:
    def ask(*command: str) -> str:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or ask("git", "rev-parse", "--short", "HEAD"),
        "dirty": int(bool(ask("git", "status", "--porcelain", "--untracked-files=no"))),
    }


if __name__ == "__main__":
    main()
