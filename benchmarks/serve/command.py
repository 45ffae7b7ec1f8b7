"""Common parts of this package's commands: options, and the run that writes a CSV and prints a table."""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.csv_results import CsvResults, add_output_options

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
"""Bytes of x for commands with several sizes."""


def parse_cores(text: str) -> set[int]:
    """Parse cores in the format of `taskset`: 0, 0-7 or 0,2-3."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def make_parser(cores_of: str) -> argparse.ArgumentParser:
    """The parser of a command, with the options that all commands have.

    Args:
        cores_of: names the users of the two values of `--cores`.
    """
    options = argparse.ArgumentParser()
    add_output_options(options)
    options.add_argument(
        "--cores",
        nargs=2,
        type=parse_cores,
        default=(parse_cores("0"), parse_cores("1")),
        help=f"of {cores_of}, as in 0-7 8",
    )
    return options


def add_turn_options(options: argparse.ArgumentParser, whose: str, seconds: float, rounds: int = 7) -> None:
    """Add options for the number and the duration of turns.

    Args:
        whose: whose turns these are.
        seconds, rounds: defaults.
    """
    options.add_argument("--rounds", type=int, default=rounds, help=f"turns of {whose}")
    options.add_argument("--seconds", type=float, default=seconds, help="of each turn")


def add_size_option(options: argparse.ArgumentParser, sizes: Mapping[str, int] = SIZES) -> None:
    """Add an option for the sizes of x to measure."""
    options.add_argument("--size", choices=sizes, action="append", default=None, help="of x; all if not given")


def run_command(
    asked: argparse.Namespace,
    columns: Sequence[str],
    measure: Callable[[CsvResults, Path, argparse.Namespace], None],
    table: Callable[[Sequence[Mapping[str, object]]], str] | None = None,
) -> int:
    """Measure, with a folder for files of servers and clients; print the table; return the exit code.

    Args:
        asked: the options.
        columns: of the CSV.
        measure: adds the rows.
        table: formats all rows; None if `measure` prints the results.
    """
    results = CsvResults(asked.out, columns, asked.commit)
    with tempfile.TemporaryDirectory() as folder:
        measure(results, Path(folder), asked)
    if table is not None:
        print(table(results.rows))
    return results.exit_code
