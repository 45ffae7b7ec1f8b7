"""The CSV that every benchmark writes and that the tables and plots are made from."""

import csv
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import triton

from benchmarks.harness.timing import Quantiles
from benchmarks.workload.cells import sweep_rows
from benchmarks.workload.suites import SWEEP_LENGTHS

COLUMNS = (
    *("gpu", "driver", "torch", "triton", "commit", "dirty"),
    *("op", "pass", "variant", "shape", "dtype", "layout", "provider"),
    *("ms_p20", "ms_p50", "ms_p80", "gbps", "of_copy", "max_error"),
)

OURS = "fusednorm"

MODEL = "model"
"""The operation of rows whose layout is a whole model's name and whose shape is its batch."""


class Timed(Protocol):
    """What the columns tell of a row but for its provider and figures."""

    @property
    def op(self) -> str: ...

    @property
    def pass_(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def shape_name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def layout(self) -> str: ...


def machine(commit: str = "") -> dict[str, object]:
    """What is the same in every row of a run; the commit is asked of git when it is empty."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or _ask("git", "rev-parse", "--short", "HEAD"),
        "dirty": int(bool(_ask("git", "status", "--porcelain", "--untracked-files=no"))),
    }


def _ask(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def row(
    cell: Timed,
    provider: str,
    time_ms: Quantiles | None,
    error: float,
    nbytes: int | None = None,
    roof: float | None = None,
) -> dict[str, object]:
    """One provider's row of a cell.

    Args:
        time_ms: None where the result is wrong, and its time left out.
        nbytes: the fewest bytes of the cell's pass; None where the time is not the device's.
        roof: bytes per millisecond of a copy, in the same run.
    """
    rate = None if nbytes is None or time_ms is None else nbytes / time_ms.p50
    p20, p50, p80 = ("", "", "") if time_ms is None else (f"{ms:.5f}" for ms in time_ms)
    return {
        "op": cell.op,
        "pass": cell.pass_,
        "variant": cell.variant,
        "shape": cell.shape_name,
        "dtype": cell.dtype,
        "layout": cell.layout,
        "provider": provider,
        "ms_p20": p20,
        "ms_p50": p50,
        "ms_p80": p80,
        "gbps": "" if rate is None else f"{rate / 1e6:.0f}",
        "of_copy": "" if rate is None or roof is None else f"{rate / roof:.3f}",
        "max_error": f"{error:.3g}",
    }


def is_sweep(record: Mapping[str, str]) -> bool:
    """Whether a row of the CSV is of a sweep over row lengths, x of 256 MiB, so that its length says its shape."""
    if record["layout"] != "rows":
        return False
    rows, cols = map(int, record["shape"].split("x"))
    return cols in SWEEP_LENGTHS and rows == sweep_rows(cols, record["dtype"])


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several files; where two have the same provider of the same cell, the first holds.

    Each row has one column more, `ours`: the fraction of a copy that fusednorm reached in the same file and cell,
    empty where the file does not have it.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for path in paths:
        with path.open(newline="") as file:
            of_file = list(csv.DictReader(file))
        ours = {_cell(record): record["of_copy"] for record in of_file if record["provider"] == OURS}
        for record in of_file:
            cell = _cell(record)
            rows.setdefault((*cell, record["provider"]), record | {"ours": ours.get(cell, "")})
    return list(rows.values())


def _cell(record: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(record[column] for column in ("op", "pass", "variant", "shape", "dtype", "layout"))
