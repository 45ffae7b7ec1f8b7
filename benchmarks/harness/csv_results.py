"""The CSV of a run, whose rows name the machine, the versions and the commit."""

import argparse
import contextlib
import csv
import importlib
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

_ROOT = Path(__file__).parents[2]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that writes a CSV, and name the command by its module in `--help`."""
    module = sys.modules["__main__"].__spec__
    if module is not None:
        parser.prog = f"python -m {module.name.removesuffix('.__main__')}"
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    parser.add_argument(
        "--commit", default="", help="the commit that this tree is without any change; by default git says"
    )


def describe_run(commit: str = "", packages: Sequence[str] = ("torch", "triton")) -> dict[str, object]:
    """Describe the machine and the code: the first columns of every CSV, equal in all rows of a run.

    Args:
        commit: the commit that the tree is without any change; if empty, git says which it is, and whether tracked
            files differ from it (`dirty`).  Where git says nothing, both are empty.
        packages: the packages whose versions matter; one that is not installed has an empty version.
    """
    of_gpu = _run_command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpu, _, driver = of_gpu.partition("\n")[0].partition(", ")
    processor = f"{_find_processor_name()}, {os.cpu_count()} cores"
    head = _run_command("git", "rev-parse", "--short", "HEAD")
    # A command before this one may have written its CSV here.
    changes = _run_command("git", "status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return {
        "machine": f"{processor}, {gpu}" if gpu else processor,
        "linux": platform.release(),
        "gpu": gpu,
        "driver": driver,
        **{name: _find_version(name) for name in packages},
        "commit": commit or head,
        "dirty": 0 if commit else int(bool(changes)) if head else "",
    }


def _run_command(*command: str) -> str:
    """What a command says of the tree or the machine; empty if it fails or does not exist."""
    with contextlib.suppress(OSError):
        answer = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else ""
    return ""


def _find_version(package: str) -> str:
    with contextlib.suppress(ImportError):
        return str(importlib.import_module(package).__version__)
    return ""


def _find_processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


class CsvResults:
    """A CSV that is written row by row; one part of a run may fail without the others.

    Attributes:
        rows: as they were added.
        exit_code: 1 once a part has failed.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        commit: str = "",
        packages: Sequence[str] = ("torch", "triton"),
    ) -> None:
        """Begin the file, in a folder that is made if it does not exist.

        Args:
            columns: those of the rows, after those of the run.
            commit, packages: as `describe_run` takes them.
        """
        self.rows: list[Mapping[str, object]] = []
        self.exit_code = 0
        self._run = describe_run(commit, packages)
        self._path = path
        self._columns = (*self._run, *columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writeheader()

    def add_row(self, row: Mapping[str, object]) -> None:
        """Write a row, after the columns that describe the run."""
        self.rows.append(row)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(self._run | dict(row))

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
