"""Times fusednorm against its peers: correctness first, then speed, one CSV row per cell and provider.

    python -m benchmarks --suite plain --out benchmarks/results/plain.csv
    python -m benchmarks --suite plain --cells 'backward .*x8192 ' --providers fusednorm,quack --out part.csv
    python -m benchmarks --suite layer_norm --shard 2/6 --seconds 540 --out layer-norm-2.csv
    python -m benchmarks --suite adaptive channels instance --out benchmarks/results/new_norms.csv
    python -m benchmarks --suite host --out benchmarks/results/host.csv
    python -m benchmarks --suite models --cells 'gpt2|bert' --out benchmarks/results/models.csv

A provider with wrong results is not timed.  `of_copy` is the minimum number of bytes of the pass divided by its
time, as a fraction of the rate of a device-to-device copy of x in the same run.  If a forward pass only reads x and
writes y, that is the copy's time divided by the pass's.  For small shapes it must be read that way, because neither
time depends on the bytes.

`host` and `models`, which must run alone, measure the time of a program (`benchmarks.host`, `benchmarks.models`):
their rows have no such fraction.  By default they start no cell after three and ten minutes (`--seconds`).
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import records
from benchmarks.harness.compile_ahead import wait_for_extension
from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.harness.progress import ProgressDisplay
from benchmarks.harness.suite import BenchmarkSuite, Row
from benchmarks.host.suite import HostSuite
from benchmarks.kernels.suite import KernelSuite
from benchmarks.models.suite import ModelSuite
from benchmarks.providers.registry import PROVIDERS, filter_importable, find_version
from benchmarks.workload.cell_suites import SUITES, select_shard

ALONE: dict[str, type[HostSuite | ModelSuite]] = {"host": HostSuite, "models": ModelSuite}
"""Suites that a run cannot combine with others."""

NAMES = tuple(dict.fromkeys((*PROVIDERS, *HostSuite.providers, *ModelSuite.providers)))
"""The names of all providers."""


def main() -> int:
    """Time the cells; return 1 if there was no time for some."""
    arguments = _parse_arguments()
    suite = make_suite(arguments.suite)
    cells = _select_cells(suite, arguments.cells, arguments.shard)
    providers = filter_importable(
        name for name in arguments.providers or suite.providers if name in suite.providers
    )
    seconds = suite.seconds if arguments.seconds is None else arguments.seconds
    wait_for_extension()
    began = time.monotonic()
    if arguments.warm:
        suite.compile_ahead(cells, providers, min(arguments.warm, seconds))
    results = CsvResults(arguments.out, ("provider_version", *records.COLUMNS), arguments.commit)
    with ProgressDisplay(len(cells)) as progress:
        for done, cell in enumerate(cells):
            if time.monotonic() - began > seconds:
                progress.print_line(f"out of time after {done} of {len(cells)} cells")
                return 1
            cell_began = time.monotonic()
            rows = []
            for row in suite.measure_rows(cell, providers, progress.print_line):
                results.add_row({"provider_version": find_version(str(row["provider"]))} | row)
                rows.append(row)
            figures = "  ".join(map(_format_figure, rows))
            progress.finish_step(f"{cell.name}: {figures}  ({time.monotonic() - cell_began:.1f} s)")
    return 0


def make_suite(names: Sequence[str]) -> BenchmarkSuite:
    """The suite of these names, of which at most one may be in `ALONE`."""
    return ALONE[names[0]]() if names[0] in ALONE else KernelSuite(names)


def _select_cells(suite: BenchmarkSuite, pattern: str, part: tuple[int, int]) -> list[Any]:
    cells = [cell for cell in suite.cells if re.search(pattern, cell.name)]
    return select_shard(cells, *part) if part != (1, 1) else cells


def _format_figure(row: Row) -> str:
    """The text of a row in the progress output."""
    if row["of_copy"]:
        return f"{row['provider']} {row['of_copy']}"
    value = f"{row['ms_p50']} ms" if row["ms_p50"] else "wrong"
    return f"{row['provider']} {row['pass']} {row['variant']} {value}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", nargs="+", choices=(*SUITES, *ALONE), default=["first"], help="lists of cells (default: first)"
    )
    parser.add_argument("--cells", default="", metavar="REGEX", help="only cells whose name it matches")
    parser.add_argument(
        "--shard",
        type=_parse_shard,
        default=(1, 1),
        metavar="I/N",
        help="only the I-th of N about equal parts of those",
    )
    parser.add_argument(
        "--providers", type=_parse_providers, help="comma-separated (default: all that the suite has)"
    )
    add_output_options(parser)
    parser.add_argument(
        "--warm", type=float, default=600, metavar="SECONDS", help="most time to compile ahead; 0 for not (600)"
    )
    parser.add_argument("--seconds", type=float, help="start no cell after this time, compiling included")
    arguments = parser.parse_args()
    if len(arguments.suite) > 1 and not ALONE.keys().isdisjoint(arguments.suite):
        parser.error(f"{' and '.join(ALONE)} run alone, got --suite {' '.join(arguments.suite)}")
    return arguments


def _parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text}")
    return int(match[1]), int(match[2])


def _parse_providers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
