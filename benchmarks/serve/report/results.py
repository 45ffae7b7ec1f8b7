"""The results of a run."""

import contextlib
import csv
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.serve.report import machine_description


class CsvResults:
    """A CSV that is written row by row; one part of a run may fail without the others.

    Attributes:
        rows: as they were added.
        exit_code: 1 once a part has failed.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.rows: list[Mapping[str, object]] = []
        self.exit_code = 0
        self._machine = machine_description.describe_machine()
        self._path = path
        self._columns = (*machine_description.COLUMNS, *columns)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writeheader()

    def add_row(self, row: Mapping[str, object]) -> None:
        """Write a row, after the columns that describe the machine."""
        self.rows.append(row)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(self._machine | dict(row))

    @contextlib.contextmanager
    def run_part(self, name: str) -> Iterator[None]:
        """A part of the run; its failure is printed, and the run continues."""
        try:
            yield
        except Exception:
            self.exit_code = 1
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)


def compute_column_median(rows: Sequence[Mapping[str, object]], column: str) -> float:
    """The median of a column."""
    return median(float(str(row[column])) for row in rows)
