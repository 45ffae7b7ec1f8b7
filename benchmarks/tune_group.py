"""Times every plausible launch configuration of a GroupNorm pass: what its launch tables rest on.

    python -m benchmarks.tune_group --out tune.csv [--pass forward] [--shape 8x512x64x64] [--layout nchw]

Each configuration must agree with torch in float32 before it is timed.  32 groups, SiLU after the norm.
"""

import argparse
import csv
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import group_norm_backward_launch, group_norm_forward_launch, traffic
from fusednorm.checks import Epilogue
from fusednorm.group_norm_backward_plan import plan_backward
from fusednorm.group_norm_forward_plan import plan_forward
from fusednorm.group_norm_launch import Sample
from fusednorm.launch import Launch, run
from fusednorm.results import Backward, Forward
from torch import Tensor

from benchmarks import group_backward_candidates, group_forward_candidates
from benchmarks.problem import EPS
from benchmarks.suites import PASSES
from benchmarks.timing import Timer
from benchmarks.workers import run_in_workers

Config = group_norm_forward_launch.Forward | group_norm_backward_launch.Backward

CANDIDATES = {"forward": group_forward_candidates.candidates, "backward": group_backward_candidates.candidates}
GROUPS = 32
ACTIVATION = "silu"
LAYOUTS = ("nchw", "nhwc")
SHAPES = (
    (8, 512, 64, 64),
    (2, 960, 128, 128),
    (4, 128, 512, 512),
    (32, 256, 56, 56),
    (1, 128, 20, 256, 256),
    (16, 320, 64, 64),
    (4, 256, 256, 256),
    (1, 128, 1024, 1024),
    (2, 640, 32, 32),
    (2, 320, 64, 64),
    (1, 512, 128, 128),
    (2, 1280, 16, 16),
)
"""Those of the targets; one of each class first."""

_COMPILING = 0.5
"""Of the seconds that a run may take, at most."""

COLUMNS = ("pass", "shape", "layout", "dtype", "config", "ms", "of_copy")


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass over one tensor; `shape` is x's, whatever the layout."""

    pass_: str
    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def sample(self) -> Sample:
        channels = self.shape[1] // GROUPS
        return Sample(GROUPS, channels, math.prod(self.shape[2:]), self.layout == "nhwc")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def name(self) -> str:
        """forward bfloat16 8x512x64x64 nchw."""
        return f"{self.pass_} {self.dtype} {'x'.join(map(str, self.shape))} {self.layout}"

    def configs(self, only: str = "") -> Iterator[Config]:
        """Its candidates whose repr matches."""
        for config in CANDIDATES[self.pass_](self.sample, self.torch_dtype.itemsize, self.shape[0]):
            if re.search(only, repr(config)):
                yield config


@dataclass(frozen=True, slots=True)
class Timed:
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    ms: float
    of_copy: float
    config: Config

    @property
    def name(self) -> str:
        """ForwardHeld(8, 3, 1, 0)."""
        return type(self.config).__name__ + str(tuple(asdict(self.config).values()))


class Pass:
    """The tensors of a cell, and its launches under a configuration."""

    def __init__(self, cell: Cell, device: str) -> None:
        self.cell = cell
        fill = torch.empty if device == "meta" else torch.randn
        options: dict[str, Any] = {"device": device, "dtype": cell.torch_dtype}
        n, c, *spatial = cell.shape

        def laid_out() -> Tensor:
            if cell.layout == "nchw":
                return fill(cell.shape, **options)
            axes = (0, 1 + len(spatial), *range(1, 1 + len(spatial)))
            return fill((n, *spatial, c), **options).permute(axes)

        self.x, self.dy = laid_out(), laid_out() if cell.pass_ == "backward" else None
        self.weight, self.bias = (fill(c, **options) for _ in range(2))
        statistics = {"device": device, "dtype": torch.float32}
        self.mean, self.rstd = (torch.empty((n, GROUPS), **statistics) for _ in range(2))
        if device != "meta":
            h = self.x.float().reshape(n, GROUPS, -1)
            variance, mean = torch.var_mean(h, dim=-1, correction=0)
            self.mean.copy_(mean)
            self.rstd.copy_((variance + EPS).rsqrt())
        like = (self.x,) if cell.pass_ == "forward" else (self.x, self.weight, self.bias)
        self.results = tuple(map(torch.empty_like, like))

    def plan(self, config: Config) -> list[Launch]:
        """Into `results`."""
        epilogue = Epilogue(ACTIVATION)
        inputs = (self.x, self.cell.sample, self.weight, self.bias, EPS)
        if self.dy is None:
            assert isinstance(config, group_norm_forward_launch.Forward)
            return plan_forward(*inputs, None, epilogue, Forward(*self.results), config)
        assert isinstance(config, group_norm_backward_launch.Backward)
        after = (self.mean, self.rstd, None, None, epilogue, Backward(*self.results), config)
        return plan_backward(self.dy, *inputs, *after)

    def run(self, plan: Iterable[Launch]) -> None:
        """Make the launches of a plan."""
        run(self.x.device, plan)

    def expected(self) -> tuple[Tensor, ...]:
        """Torch's results in float32."""
        leaves = [t.detach().float().requires_grad_(self.dy is not None) for t in (self.x, self.weight, self.bias)]
        y = F.silu(F.group_norm(leaves[0], GROUPS, leaves[1], leaves[2], EPS))
        if self.dy is None:
            return (y,)
        y.backward(self.dy.float())
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that the pass must move."""
        fewest = traffic.forward_bytes if self.dy is None else traffic.backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())


def compile_kernels(item: tuple[Cell, Config]) -> None:
    """Fill Triton's cache, in a process of its own."""
    cell, config = item
    for step in Pass(cell, "meta").plan(config):
        step.kernel.warmup(*step.arguments, grid=step.grid, enable_fp_fusion=True, **step.options)


def kernels_of(work: dict[Cell, list[Config]]) -> dict[Cell, list[tuple[Cell, Config]]]:
    """One item for each set of kernels, at the first cell that needs it: cells and configurations share theirs."""
    known: set[object] = set()
    kernels: dict[Cell, list[tuple[Cell, Config]]] = {}
    for cell, configs in work.items():
        of = Pass(cell, "meta")
        kernels[cell] = []
        for config in configs:
            key = tuple(
                (step.kernel.fn.__name__, cell.dtype, tuple(sorted(step.options.items())))
                for step in of.plan(config)
            )
            if key not in known:
                known.add(key)
                kernels[cell].append((cell, config))
    return kernels


def compiled_cells(kernels: dict[Cell, list[tuple[Cell, Config]]], seconds: float) -> list[Cell]:
    """Compile for each cell in turn; those for which that came to its end in time."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    items = [item for of_cell in kernels.values() for item in of_cell]
    began = time.monotonic()
    taken = run_in_workers(compile_kernels, items, workers, seconds)
    spent = time.monotonic() - began
    # Those taken last were given up where time ran out.
    done = taken - workers if spent > seconds else taken
    print(f"{done} of {len(items)} sets of kernels compiled in {spent:.0f} s", flush=True)
    cells = []
    for cell, of_cell in kernels.items():
        done -= len(of_cell)
        if done < 0:
            break
        cells.append(cell)
    return cells


def time_cell(cell: Cell, configs: Iterable[Config], timer: Timer, device: str = "cuda") -> list[Timed]:
    """Every configuration that agrees with torch, fastest first; stderr hears of the others."""
    of = Pass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    print(f"{cell.name}: copy {roof / 1e6:.0f} GB/s", flush=True)
    expected = of.expected()
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
            print(f"{cell.name} {config}: {str(error)[:160]}", file=sys.stderr)
            continue
        rows.append(Timed(ms, of.min_bytes / ms / roof, config))
    return sorted(rows, key=lambda row: row.ms)


def _check(results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (actual, right) in enumerate(zip(results, expected, strict=True)):
        if not torch.allclose(actual.float(), right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
            raise ValueError(f"result {index} is wrong")


def main() -> None:
    arguments = _arguments()
    shapes = (
        [tuple(map(int, shape.split("x"))) for shape in arguments.shape.split(",")] if arguments.shape else SHAPES
    )
    cells = [
        Cell(pass_, shape, layout, dtype)
        for pass_ in arguments.passes.split(",")
        for dtype in arguments.dtype.split(",")
        for shape in shapes
        for layout in arguments.layout.split(",")
    ]
    work = {cell: list(cell.configs(arguments.only)) for cell in cells}
    began = time.monotonic()
    cells = compiled_cells(kernels_of(work), arguments.seconds * _COMPILING)
    if arguments.compile_only:
        return

    timer = Timer()
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for cell in cells:
            if time.monotonic() - began > arguments.seconds:
                print("out of time", file=sys.stderr)
                break
            rows = time_cell(cell, work[cell], timer)
            shape = "x".join(map(str, cell.shape))
            for row in rows:
                figures = (f"{row.ms:.5f}", f"{row.of_copy:.4f}")
                writer.writerow([cell.pass_, shape, cell.layout, cell.dtype, row.name, *figures])
            file.flush()
            for row in rows[:4]:
                print(f"    {row.of_copy:.3f} {row.ms * 1e3:.1f} us {row.name}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--pass", dest="passes", default=",".join(PASSES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default=",".join(LAYOUTS))
    parser.add_argument("--shape", default="", help="8x512x64x64,...; every shape of the targets when empty")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose repr it matches")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache and stop")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no cell after this time, half of which may be compiling",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
