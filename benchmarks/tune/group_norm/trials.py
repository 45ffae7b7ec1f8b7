"""A cell's configurations, compiled and timed; workers import these by name, as they cannot from `__main__`."""

import csv
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fusednorm.launch.execution import run_launches
from fusednorm.launch.recorded_launches import bind_to_nothing

from benchmarks.harness.timing import DeviceTimer
from benchmarks.harness.worker_pool import run_in_workers
from benchmarks.tune.group_norm.passes import Config, GroupNormTuningCell, GroupNormTuningPass, format_config

COLUMNS = ("pass", "shape", "layout", "dtype", "config", "ms", "of_copy", "error")

SHOWN = 5
"""Number of a cell's fastest configurations in the printed line."""


@dataclass(frozen=True, slots=True)
class TimedConfig:
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    config: Config
    ms: float
    of_copy: float


@dataclass(frozen=True, slots=True)
class FailedConfig:
    """A configuration that the device refused or that gave a wrong result."""

    config: Config
    error: str


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """A cell's configurations, the fastest first, and the rate of a copy in bytes per millisecond."""

    cell: GroupNormTuningCell
    roof: float
    timed: list[TimedConfig]
    failed: list[FailedConfig]

    @property
    def summary_line(self) -> str:
        """The best of them, in one line."""
        best = "; ".join(
            f"{row.of_copy:.3f} {row.ms * 1e3:.1f} us {format_config(row.config)}" for row in self.timed[:SHOWN]
        )
        failures = f"; {len(self.failed)} failed: {self.failed[0].error[:60]}" if self.failed else ""
        return f"{self.cell.name}, copy {self.roof / 1e6:.0f} GB/s: {best}{failures}"

    def iterate_rows(self) -> Iterator[list[str]]:
        """Values of COLUMNS."""
        cell = self.cell
        leading = [cell.pass_, "x".join(map(str, cell.shape)), cell.layout, cell.dtype]
        for timed in self.timed:
            yield [*leading, format_config(timed.config), f"{timed.ms:.5f}", f"{timed.of_copy:.4f}", ""]
        for failed in self.failed:
            yield [*leading, format_config(failed.config), "", "", failed.error]


@dataclass(frozen=True, slots=True)
class TuningItem:
    """A cell to time and the file to add its rows to, unless it is `deadline_s` on the monotonic clock."""

    cell: GroupNormTuningCell
    configs: list[Config]
    out: Path
    deadline_s: float


def compile_config(item: tuple[GroupNormTuningCell, Config]) -> None:
    """Fill Triton's cache, in a worker process."""
    cell, config = item
    for step in GroupNormTuningPass(cell, "meta").plan_launches(config):
        step.kernel.warmup(*bind_to_nothing(step.arguments), grid=step.grid, enable_fp_fusion=True, **step.options)


def select_distinct_kernels(
    work: dict[GroupNormTuningCell, list[Config]],
) -> dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]]:
    """One item for each set of kernels, at the first cell that needs it; cells and configurations share kernels."""
    known: set[object] = set()
    kernels: dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]] = {}
    for cell, configs in work.items():
        of = GroupNormTuningPass(cell, "meta")
        kernels[cell] = []
        for config in configs:
            key = tuple(
                (step.kernel.fn.__name__, cell.dtype, tuple(sorted(step.options.items())))
                for step in of.plan_launches(config)
            )
            if key not in known:
                known.add(key)
                kernels[cell].append((cell, config))
    return kernels


def compile_cells(
    kernels: dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]], seconds: float
) -> list[GroupNormTuningCell]:
    """Compile for each cell in turn; return the cells that were finished in time."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    items = [item for of_cell in kernels.values() for item in of_cell]
    began = time.monotonic()
    taken = run_in_workers(compile_config, items, workers, seconds)
    spent = time.monotonic() - began
    # If time ran out, the last items were not finished.
    done = taken - workers if spent > seconds else taken
    print(f"{done} of {len(items)} sets of kernels compiled in {spent:.0f} s", flush=True)
    cells = []
    for cell, of_cell in kernels.items():
        done -= len(of_cell)
        if done < 0:
            break
        cells.append(cell)
    return cells


def time_cell(
    cell: GroupNormTuningCell, configs: Iterable[Config], timer: DeviceTimer, device: str = "cuda"
) -> TuningOutcome:
    """Time every configuration that agrees with torch; stop after a permanent device error."""
    of = GroupNormTuningPass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    timed, failed = [], []
    for config in configs:
        try:
            plan = of.plan_launches(config)
            for result in of.results:
                result.fill_(float("nan"))
            run_launches(of.x.device, plan, of.tensors)
            of.check_results()
            ms = timer(partial(run_launches, of.x.device, plan, of.tensors), repeats=20, warmup=2).p50
        except Exception as error:
            failed.append(FailedConfig(config, " ".join(str(error).split())[:200]))
            if _is_permanent(failed[-1]):
                break
            continue
        timed.append(TimedConfig(config, ms, of.min_bytes / ms / roof))
    return TuningOutcome(cell, roof, sorted(timed, key=lambda row: row.ms), failed)


def time_item(item: TuningItem) -> None:
    """Time one cell in a process that times several, and write and print the outcome."""
    if time.monotonic() > item.deadline_s:
        return
    outcome = time_cell(item.cell, item.configs, _timer())
    with item.out.open("a", newline="") as file:
        csv.writer(file).writerows(outcome.iterate_rows())
    print(outcome.summary_line, flush=True)
    if outcome.failed and _is_permanent(outcome.failed[-1]):
        raise RuntimeError(outcome.failed[-1].error)  # Another process takes the next cell.


def _is_permanent(failure: FailedConfig) -> bool:
    return "CUDA error" in failure.error


_timer = cache(DeviceTimer)
