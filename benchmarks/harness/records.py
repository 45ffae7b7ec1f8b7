"""The rows of kernels, calls and models, from which the tables and plots are made."""

import csv
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from benchmarks.harness.timing import TimeQuantiles
from benchmarks.workload.benchmark_cells import compute_sweep_rows
from benchmarks.workload.cell_suites import SWEEP_LENGTHS

COLUMNS = (
    *("op", "pass", "variant", "shape", "dtype", "layout", "provider"),
    *("ms_p20", "ms_p50", "ms_p80", "gbps", "of_copy", "max_error"),
)
"""The columns after those of the run (`benchmarks.harness.csv_results.describe_run`)."""

CELL = ("op", "pass", "variant", "shape", "dtype", "layout")
"""The columns that identify a cell; every provider has a row for each."""

_cell: Callable[[Mapping[str, str]], tuple[str, ...]] = itemgetter(*CELL)

OURS = "fusednorm"

MODEL = "model"
"""The operation of rows whose layout is a whole model's name and whose shape is its batch."""


class CellColumns(Protocol):
    """The columns of a row without its provider and figures."""

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


def make_row(
    cell: CellColumns,
    provider: str,
    time_ms: TimeQuantiles | None,
    error: float,
    nbytes: int | None = None,
    roof: float | None = None,
) -> dict[str, object]:
    """One provider's row of a cell.

    Args:
        time_ms: None if the result is wrong.
        nbytes: minimum bytes of the cell's pass; None if the time is not the device's.
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


def is_sweep_row(record: Mapping[str, str]) -> bool:
    """Whether a row of the CSV is of a sweep over row lengths with x of 256 MiB: its length defines its shape."""
    if record["layout"] != "rows":
        return False
    rows, cols = map(int, record["shape"].split("x"))
    return cols in SWEEP_LENGTHS and rows == compute_sweep_rows(cols, record["dtype"])


def read_records(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several files; if several have the same provider and cell, the first file counts.

    Within a file the last such row counts, because repeated measurements are appended.  Each row has an additional
    column, `ours`: fusednorm's fraction of a copy in the same file and cell, empty if the file has none.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for path in paths:
        of_file = {(*_cell(record), record["provider"]): record for record in read_csv(path)}
        ours = {_cell(record): record["of_copy"] for record in of_file.values() if record["provider"] == OURS}
        for key, record in of_file.items():
            rows.setdefault(key, record | {"ours": ours.get(_cell(record), "")})
    return list(rows.values())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The unchanged rows of any CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
