"""Times every plausible launch configuration of a GroupNorm pass: what its launch tables rest on.

    python -m benchmarks.tune_group --out tune.csv [--pass forward] [--shape 8x512x64x64] [--layout nchw]

Each configuration must agree with torch in float32 before it is timed; what fails stands in the file with its
error.  32 groups, SiLU after the norm.  A cell is written when it is done, its best configurations printed.
"""

import argparse
import csv
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fusednorm.launch.launch import run

from benchmarks.group_pass import Cell, Config, Pass, name_of
from benchmarks.suites import PASSES
from benchmarks.timing import Timer
from benchmarks.workers import run_in_workers

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

_LONGEST_CELL = 60.0
"""Seconds after which a cell that was begun in time is given up."""

COLUMNS = ("pass", "shape", "layout", "dtype", "config", "ms", "of_copy", "error")

SHOWN = 5
"""Of a cell's configurations, the fastest, in the line that is printed."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    config: Config
    ms: float
    of_copy: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A configuration that the device refused or that gave a wrong result."""

    config: Config
    error: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell's configurations, the fastest first, and the rate of a copy in bytes per millisecond."""

    cell: Cell
    roof: float
    timed: list[Timed]
    failed: list[Failed]

    @property
    def line(self) -> str:
        """The best of them, in one line."""
        best = "; ".join(
            f"{row.of_copy:.3f} {row.ms * 1e3:.1f} us {name_of(row.config)}" for row in self.timed[:SHOWN]
        )
        failures = f"; {len(self.failed)} failed: {self.failed[0].error[:60]}" if self.failed else ""
        return f"{self.cell.name}, copy {self.roof / 1e6:.0f} GB/s: {best}{failures}"

    def rows(self) -> Iterator[list[str]]:
        """Values of COLUMNS."""
        cell = self.cell
        leading = [cell.pass_, "x".join(map(str, cell.shape)), cell.layout, cell.dtype]
        for timed in self.timed:
            yield [*leading, name_of(timed.config), f"{timed.ms:.5f}", f"{timed.of_copy:.4f}", ""]
        for failed in self.failed:
            yield [*leading, name_of(failed.config), "", "", failed.error]


@dataclass(frozen=True, slots=True)
class Item:
    """A cell to time and the file to add its rows to, unless it is `latest` on the monotonic clock."""

    cell: Cell
    configs: list[Config]
    out: Path
    latest: float


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


def time_cell(cell: Cell, configs: Iterable[Config], timer: Timer, device: str = "cuda") -> Outcome:
    """Every configuration that agrees with torch, timed; none after an error that the device does not get over."""
    of = Pass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    timed, failed = [], []
    for config in configs:
        try:
            plan = of.plan(config)
            for result in of.results:
                result.fill_(float("nan"))
            run(of.x.device, plan)
            of.check()
            ms = timer(partial(run, of.x.device, plan), repeats=20, warmup=2).p50
        except Exception as error:
            failed.append(Failed(config, " ".join(str(error).split())[:200]))
            if _lasts(failed[-1]):
                break
            continue
        timed.append(Timed(config, ms, of.min_bytes / ms / roof))
    return Outcome(cell, roof, sorted(timed, key=lambda row: row.ms), failed)


def time_item(item: Item) -> None:
    """Time one cell in a process that times several, and write and print what comes of it."""
    if time.monotonic() > item.latest:
        return
    outcome = time_cell(item.cell, item.configs, _timer())
    with item.out.open("a", newline="") as file:
        csv.writer(file).writerows(outcome.rows())
    print(outcome.line, flush=True)
    if outcome.failed and _lasts(outcome.failed[-1]):
        raise RuntimeError(outcome.failed[-1].error)  # Another process takes the next cell.


def _lasts(failure: Failed) -> bool:
    return "CUDA error" in failure.error


_timer = cache(Timer)


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
    latest = time.monotonic() + arguments.seconds
    cells = compiled_cells(kernels_of(work), arguments.seconds * _COMPILING)
    if arguments.compile_only:
        return
    with arguments.out.open("w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
    items = [Item(cell, work[cell], arguments.out, latest) for cell in cells]
    run_in_workers(time_item, items, 1, latest + _LONGEST_CELL - time.monotonic())


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
