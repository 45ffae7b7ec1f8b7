"""Times every plausible launch configuration of a LayerNorm pass: what `layer_norm.table` rests on.

    python -m benchmarks.tune --out tune.csv [--pass forward] [--dtype bfloat16] [--cols 4096,8192] [--rows 1,16]

Each configuration must agree with the table's own choice before it is timed.
"""

import argparse
import csv
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fusednorm import traffic
from fusednorm.launch.launch import Launch, run
from fusednorm.ops.layer_norm.backward.tile import BackwardTile
from fusednorm.ops.layer_norm.call import BackwardCall, ForwardCall
from fusednorm.ops.layer_norm.choice import plan_backward, plan_forward
from fusednorm.ops.layer_norm.table import BackwardConfig, ForwardConfig
from fusednorm.results import Backward, Forward

from benchmarks.candidates import candidates
from benchmarks.cells import sweep_rows
from benchmarks.problem import EPS
from benchmarks.suites import LONG_ROW_LENGTHS, PASSES, ROW_LENGTHS
from benchmarks.timing import Timer
from benchmarks.workers import run_in_workers

Config = ForwardConfig | BackwardConfig

COLUMNS = ("pass", "rows", "cols", "dtype", "config", "ms", "of_copy")


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass over rows of one length; as many as make x 256 MiB unless `rows` says how many."""

    pass_: str
    cols: int
    dtype: str
    rows: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


class Timed(NamedTuple):
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    ms: float
    of_copy: float
    config: Config

    @property
    def name(self) -> str:
        """ForwardSweep(4096, 8, 0)."""
        return type(self.config).__name__ + str(tuple(asdict(self.config).values()))


class Pass:
    """The tensors of a cell, and its launches under a configuration."""

    def __init__(self, cell: Cell, device: str) -> None:
        rows, cols = cell.rows or sweep_rows(cell.cols, cell.dtype), cell.cols
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, cell.dtype)}
        fill = torch.empty if device == "meta" else torch.randn
        self._pass = cell.pass_
        self.x, self.dy = (fill(rows, cols, **options) for _ in range(2))
        self.weight, self.bias = (fill(cols, **options) for _ in range(2))
        self.mean, self.rstd = torch.zeros(rows, device=device), torch.ones(rows, device=device)
        shapes = (self.x,) if cell.pass_ == "forward" else (self.x, self.weight, self.bias)
        self.results = tuple(map(torch.empty_like, shapes))

    def plan(self, config: Config | None = None) -> list[Launch]:
        """Into `results`; under the table's own choice when None."""
        if self._pass == "forward":
            assert config is None or isinstance(config, ForwardConfig)
            out = Forward(*self.results)
            return plan_forward(ForwardCall(x=self.x, weight=self.weight, bias=self.bias, eps=EPS, out=out), config)
        assert config is None or isinstance(config, BackwardConfig)
        call = BackwardCall(
            dy=self.dy, x=self.x, weight=self.weight, bias=self.bias, eps=EPS, mean=self.mean, rstd=self.rstd,
            out=Backward(*self.results),
        )  # fmt: skip
        return plan_backward(call, config)

    def run(self, plan: Iterable[Launch]) -> None:
        """Make the launches of a plan."""
        run(self.x.device, plan)

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that the pass must move."""
        fewest = traffic.forward_bytes if self._pass == "forward" else traffic.backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())


def compile_kernels(item: tuple[Cell, Config]) -> None:
    """Fill Triton's cache, in a process of its own."""
    cell, config = item
    for step in Pass(cell, "meta").plan(config):
        step.kernel.warmup(*step.arguments, grid=step.grid, enable_fp_fusion=True, **step.options)


def kernels_of(work: Iterable[tuple[Cell, Config]]) -> list[tuple[Cell, Config]]:
    """One item for each set of kernels: tiles that differ in the number of programs alone share theirs."""
    shared = (
        (cell, replace(config, programs_per_sm=1) if isinstance(config, BackwardTile) else config)
        for cell, config in work
    )
    return list(dict.fromkeys(shared))


def time_cell(cell: Cell, configs: Iterable[Config], timer: Timer, device: str = "cuda") -> list[Timed]:
    """Every configuration that agrees with the table's choice, fastest first; stderr hears of the others."""
    of = Pass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    of.run(of.plan())
    expected = tuple(result.clone() for result in of.results)
    rows = []
    for config in configs:
        try:
            plan = of.plan(config)
            for result in of.results:
                result.fill_(float("nan"))
            of.run(plan)
            _check(of.results, expected)
            ms = timer(partial(of.run, plan), repeats=20, warmup=2).p50
        except Exception as error:
            print(f"{cell} {config}: {str(error)[:120]}", file=sys.stderr)
            continue
        rows.append(Timed(ms, of.min_bytes / ms / roof, config))
    return sorted(rows, key=lambda row: row.ms)


def _check(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for index, (actual, right) in enumerate(zip(results, expected, strict=True)):
        if not torch.allclose(actual, right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
            raise ValueError(f"result {index} is wrong")


def main() -> None:
    arguments = _arguments()
    cells = [
        Cell(pass_, cols, dtype, rows)
        for pass_ in arguments.passes.split(",")
        for dtype in arguments.dtype.split(",")
        for cols in map(int, arguments.cols.split(","))
        for rows in map(int, arguments.rows.split(","))
    ]
    work = {
        cell: [
            config
            for config in candidates(cell.pass_, cell.cols, cell.itemsize)
            if re.search(arguments.only, repr(config))
        ]
        for cell in cells
    }
    began = time.monotonic()
    kernels = kernels_of((cell, config) for cell, configs in work.items() for config in configs)
    run_in_workers(compile_kernels, kernels, max(1, (os.cpu_count() or 2) - 2), arguments.seconds)
    print(f"{len(kernels)} configurations compiled in {time.monotonic() - began:.0f} s", flush=True)

    timer = Timer()
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for cell, configs in work.items():
            if time.monotonic() - began > arguments.seconds:
                print("out of time", file=sys.stderr)
                break
            rows = time_cell(cell, configs, timer)
            for row in rows:
                writer.writerow(
                    [cell.pass_, cell.rows, cell.cols, cell.dtype, row.name, f"{row.ms:.5f}", f"{row.of_copy:.4f}"]
                )
            file.flush()
            best = "; ".join(f"{row.of_copy:.3f} {row.name}" for row in rows[:4])
            print(f"{cell.pass_} {cell.dtype} {cell.rows}x{cell.cols}: {best}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--pass", dest="passes", default=",".join(PASSES))
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--cols", default=",".join(map(str, ROW_LENGTHS + LONG_ROW_LENGTHS[:-1])))
    parser.add_argument("--rows", default="0", help="0 is as many as make x 256 MiB")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose repr it matches")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no cell after this time, compiling included"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
