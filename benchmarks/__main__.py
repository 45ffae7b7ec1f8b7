"""Times fusednorm against its peers: correctness first, then speed, one CSV row a cell and provider.

    python -m benchmarks --suite plain --out benchmarks/results/plain.csv
    python -m benchmarks --suite plain --cells 'backward .*x8192 ' --providers fusednorm,quack --out part.csv
    python -m benchmarks --suite layer_norm --shard 2/6 --seconds 540 --out layer-norm-2.csv

A provider that is wrong is not timed.  `of_copy` is the fewest bytes of the pass over its time, as a fraction of
what a device-to-device copy of x reaches in the same run.  Where y is all that a forward pass adds to x, that is
the copy's time over the pass's, which is how to read small shapes: there neither is a matter of bytes.
"""

import argparse
import csv
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.harness import records
from benchmarks.harness.oracle import Oracle
from benchmarks.harness.progress import Progress
from benchmarks.harness.timing import Timer
from benchmarks.harness.warm import warm
from benchmarks.providers.plain import copy
from benchmarks.providers.registry import PROVIDERS, Provider, available
from benchmarks.workload.problem import Problem, Tensors
from benchmarks.workload.suites import SUITES, cells_of, shard


def main() -> None:
    arguments = _arguments()
    chosen = (cell for cell in cells_of(arguments.suite) if re.search(arguments.cells, cell.name))
    cells = shard(chosen, *arguments.shard)
    providers = available(arguments.providers)
    began = time.monotonic()
    if arguments.warm:
        warm(cells, providers, arguments.warm)
    machine = records.machine(arguments.commit)
    timer, tensors = Timer(), Tensors()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file, Progress(len(cells)) as progress:
        writer = csv.DictWriter(file, records.COLUMNS)
        writer.writeheader()
        for done, cell in enumerate(cells):
            if time.monotonic() - began > arguments.seconds:
                progress.note(f"out of time after {done} of {len(cells)} cells")
                break
            cell_began = time.monotonic()
            rows = time_cell(Problem(cell, tensors), providers, timer, progress.note)
            writer.writerows(machine | row for row in rows)
            file.flush()
            fractions = "  ".join(f"{row['provider']} {row['of_copy']}" for row in rows)
            progress.step(f"{cell.name}: {fractions}  ({time.monotonic() - cell_began:.1f} s)")


def time_cell(
    problem: Problem, providers: Mapping[str, Provider], timer: Timer, note: Callable[[str], None]
) -> list[dict[str, object]]:
    """Rows of the copy and of every provider that has the cell and computes it right; `note` hears of failures."""
    cell = problem.cell
    oracle = Oracle(problem)
    nbytes = 2 * problem.x.nbytes
    copy_time = timer(copy(problem).call)
    roof = nbytes / copy_time.p50
    rows = [records.row(cell, "copy", copy_time, 0.0, nbytes, roof)]
    for name, provider in providers.items():
        try:
            run = provider(problem)
            if run is None:
                continue
            error = oracle.error(run)
            rows.append(records.row(cell, name, timer(run.call, before=run.before), error, problem.min_bytes, roof))
        except Exception as error_of_provider:
            note(f"{name}: {cell.name}: {str(error_of_provider)[:300]}")
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises, and ends the run, where the device is lost
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, default=["first"], help="lists of cells (default: first)"
    )
    parser.add_argument("--cells", default="", metavar="REGEX", help="only cells whose name it matches")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N about equal parts of those"
    )
    parser.add_argument(
        "--providers", type=_providers, default=list(PROVIDERS), help="comma-separated (default: all)"
    )
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--commit", default="", help="recorded in the CSV; asked of git when empty")
    parser.add_argument(
        "--warm", type=float, default=600, metavar="SECONDS", help="most time to compile ahead; 0 for not (600)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no cell after this time, compiling included"
    )
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text}")
    return int(match[1]), int(match[2])


def _providers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PROVIDERS):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(PROVIDERS)}, got {', '.join(sorted(unknown))}"
        )
    return names


if __name__ == "__main__":
    main()
