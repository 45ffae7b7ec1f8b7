"""Measures CSVs of `benchmarks/results` again, each with its command of `results.toml`.

    python -m benchmarks.measure serve.csv serve_behaviour.csv
    python -m benchmarks.measure layer_norm.csv group_norm.csv --gpus 4 --out FOLDER --commit 1a2b3c4d

The cells of kernels are spread over the GPUs: each has a process of its own with an equal part of the cells and of
the cores.  Everything else is measured alone.  `--commit`, `--seconds` and other options are passed on.
"""

import argparse
import csv
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import ALONE
from benchmarks.harness.compile_ahead import wait_for_extension
from benchmarks.harness.records import CELL, read_csv
from benchmarks.report.result_files import RESULTS, load_result_files


def list_measurable_files() -> list[str]:
    """List the CSVs whose command needs no environment of another server."""
    return [name for name, file in load_result_files().items() if "ENVIRONMENT" not in file.command]


def can_spread(name: str) -> bool:
    """Return whether the cells of a file are of kernels, which other processes on the host do not slow."""
    words = shlex.split(load_result_files()[name].command)
    return words[2] == "benchmarks" and ALONE.keys().isdisjoint(words)


def make_command(name: str, out: Path, further: Sequence[str]) -> list[str]:
    """Make the command that measures a file into `out`."""
    words = shlex.split(load_result_files()[name].command)[1:]
    return [sys.executable, *words, "--out", str(out), *further]


def measure_parts(name: str, parts: Sequence[Path], further: Sequence[str]) -> bool:
    """Measure each part on a GPU and cores of its own, all at once; return whether all succeeded."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(parts))
    running = []
    for gpu, part in enumerate(parts):
        own = ",".join(map(str, cores[gpu * share : (gpu + 1) * share] or cores))
        command = make_command(name, part, ["--shard", f"{gpu + 1}/{len(parts)}", *further])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        running.append(subprocess.Popen(["taskset", "--cpu-list", own, *command], env=environment))
    codes = [process.wait() for process in running]
    return not any(codes)


def join_parts(parts: Sequence[Path], joined: Path, former: Path) -> None:
    """Write the rows of all parts into one file, cells in the order of an existing file, new ones last."""
    rows = [row for part in parts for row in read_csv(part)]
    known = [tuple(row[column] for column in CELL) for row in read_csv(former)] if former.exists() else []
    order = {cell: number for number, cell in reversed(list(enumerate(known)))}
    rows.sort(key=lambda row: order.get(tuple(row[column] for column in CELL), len(known)))
    with joined.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if rows else CELL)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Measure the files one after the other; return 1 if a process failed or ran out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list_measurable_files(), metavar="CSV", help="files to measure")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder to write into (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="of this machine, from the first (%(default)s)")
    asked, further = parser.parse_known_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    # A server would have it compiled while it is measured.
    wait_for_extension()
    failed = False
    for name in asked.names:
        if asked.gpus == 1 or not can_spread(name):
            failed |= subprocess.run(make_command(name, asked.out / name, further), check=False).returncode != 0
            continue
        with tempfile.TemporaryDirectory() as folder:
            parts = [Path(folder) / str(gpu) for gpu in range(asked.gpus)]
            failed |= not measure_parts(name, parts, further)
            join_parts([part for part in parts if part.exists()], asked.out / name, RESULTS / name)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
