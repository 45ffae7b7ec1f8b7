"""A benchmark's CSV as Markdown tables: the fraction of a copy that each provider reaches.

python -m benchmarks.table benchmarks/results/first.csv
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

PROVIDERS = ("fusednorm", "torch", "compile", "liger", "quack", "tutorial")


def tables(rows: Iterable[dict[str, str]]) -> Iterator[str]:
    """One table for each operation and pass, a line for each cell, in the order of the rows."""
    for (op, pass_), of_pass in groupby(sorted(rows, key=_pass), key=_pass):
        cells = list(of_pass)
        present = [p for p in PROVIDERS if any(row["provider"] == p for row in cells)]
        yield f"{op} {pass_}\n"
        yield f"| shape | type | layout | variant | copy GB/s | {' | '.join(present)} | µs |"
        yield "| --- " * (6 + len(present)) + "|"
        for cell, of_cell in groupby(cells, key=_cell):
            by_provider = {row["provider"]: row for row in of_cell}
            ours = by_provider.get("fusednorm")
            fractions = [by_provider[p]["of_copy"] if p in by_provider else "-" for p in present]
            microseconds = f"{float(ours['ms_p50']) * 1e3:.1f}" if ours else "-"
            yield f"| {' | '.join((*cell, by_provider['copy']['gbps'], *fractions, microseconds))} |"
        yield ""


def _pass(row: dict[str, str]) -> tuple[str, str]:
    return row["op"], row["pass"]


def _cell(row: dict[str, str]) -> tuple[str, str, str, str]:
    return row["shape"], row["dtype"], row["layout"], row["variant"]


if __name__ == "__main__":
    with open(sys.argv[1], newline="") as file:  # noqa: PTH123 (the argument is a path as it comes)
        print(*tables(csv.DictReader(file)), sep="\n")
