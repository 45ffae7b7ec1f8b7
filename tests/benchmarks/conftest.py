"""Small problems, and a CSV as a run would write it."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.harness import records
from benchmarks.harness.timing import TimeQuantiles
from benchmarks.workload.benchmark_cells import KernelCell, compute_sweep_rows
from benchmarks.workload.problems import BenchmarkProblem, TensorCache

MACHINE = {"gpu": "A GPU", "driver": "1", "torch": "2", "triton": "3", "commit": "abc", "dirty": 0}


@pytest.fixture(scope="session", autouse=True)
def interpreted(interpreter: None) -> None:
    """Candidates are checked in the interpreter where there is no GPU."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def problem(device: str) -> Callable[..., BenchmarkProblem]:
    """A problem of a few short rows."""

    def make(
        op="layer_norm", pass_="forward", variant="plain", shape=(6, 256), dtype="float32", groups=0, layout=""
    ):
        layout = layout or ("nchw" if groups else "rows")
        return BenchmarkProblem(KernelCell(op, pass_, variant, shape, groups, dtype, layout), TensorCache(device))

    return make


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Write rows of (cell, provider, fraction of a copy of 4000 GB/s), of 5 us where that is None, or "wrong"."""

    def write(*timed: tuple[records.CellColumns, str, float | str | None], name: str = "run.csv") -> Path:
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, (*MACHINE, *records.COLUMNS))
            writer.writeheader()
            for cell, provider, fraction in timed:
                if fraction == "wrong":
                    row = records.make_row(cell, provider, None, 1.0)
                elif fraction is None:
                    row = records.make_row(cell, provider, TimeQuantiles(0.004, 0.005, 0.006), 0.0)
                else:
                    time_ms = TimeQuantiles(*[1.0 / fraction] * 3)
                    row = records.make_row(cell, provider, time_ms, 0.0, 4_000_000_000, 4_000_000_000)
                writer.writerow(MACHINE | row)
        return tmp_path / name

    return write


@pytest.fixture
def sweep_cell() -> Callable[..., KernelCell]:
    """A cell of the sweep with x of 256 MiB."""

    def make(cols, dtype="bfloat16", pass_="forward", variant="plain"):
        return KernelCell("layer_norm", pass_, variant, (compute_sweep_rows(cols, dtype), cols), 0, dtype, "rows")

    return make
