"""Benchmarks' CSVs as plots: GB/s against the row length, a line a provider, the copy's own rate above them.

    python -m benchmarks.plots benchmarks/results/plain.csv [more.csv ...] --out docs/plots

One PNG for each operation, pass, variant and dtype: of the sweep with x of 256 MiB, and of every series with the
same number of rows.  Rows of an odd number of elements, which no vector access fits, are left to the tables.
"""

import argparse
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks import records

Row = dict[str, str]

LEAST_POINTS = 3
"""Row lengths that make a series."""

STYLES: dict[str, dict[str, Any]] = {
    "copy": {"color": "0.35", "linestyle": "--", "linewidth": 1.2},
    "fusednorm": {"color": "#c1272d", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "torch": {"color": "#e08214", "marker": "s"},
    "compile": {"color": "#35978f", "marker": "^"},
    "liger": {"color": "#2166ac", "marker": "v"},
    "quack": {"color": "#762a83", "marker": "D"},
    "tutorial": {"color": "#7f6a3f", "marker": "x"},
}


def series(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(file stem, title, rows) of every plot that the rows give."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["layout"] != "rows" or not row["of_copy"] or _cols(row) % 2:
            continue
        extent = "x of 256 MiB" if records.is_sweep(row) else f"{row['shape'].split('x')[0]} rows"
        groups.setdefault((row["op"], row["pass"], row["variant"], row["dtype"], extent), []).append(row)
    for (op, pass_, variant, dtype, extent), group in groups.items():
        if len({_cols(row) for row in group}) < LEAST_POINTS:
            continue
        stem = f"{op}-{pass_}-{variant}-{dtype}" + ("" if "rows" not in extent else "-" + extent.replace(" ", "-"))
        yield stem, f"{op} {pass_}, {variant}, {dtype}, {extent}", group


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Write one plot as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for provider, style in STYLES.items():
        # Of a cell that several files have, as they have the copy of each run, the first.
        points = {_cols(row): int(row["gbps"]) for row in reversed(rows) if row["provider"] == provider}
        if points:
            lengths, rates = zip(*sorted(points.items()), strict=True)
            axes.plot(lengths, rates, label=provider, **{"markersize": 4, "linewidth": 1.3, **style})
    shortest, longest = min(map(_cols, rows)), max(map(_cols, rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 << k for k in range(longest.bit_length()) if 1 << k >= shortest])
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:.0f}" if n < 1 << 20 else f"{n / (1 << 20):.0f} Mi")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, elements in a row")
    axes.set_ylabel("GB/s by the fewest bytes")
    axes.set_title(f"{title}\n{rows[0]['gpu']}, torch {rows[0]['torch']}, Triton {rows[0]['triton']}", fontsize=10)
    axes.grid(color="0.9")
    figure.legend(loc="outside right upper", fontsize=8)
    _save(figure, path)
    pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    """As a PNG of few colours, a third of the size."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def _cols(row: Row) -> int:
    return int(row["shape"].split("x")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for stem, title, rows in series(records.read(arguments.csv)):
        draw(rows, title, arguments.out / f"{stem}.png")
        print(arguments.out / f"{stem}.png")


if __name__ == "__main__":
    main()
