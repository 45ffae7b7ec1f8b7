"""Plots of rows: GB/s against the row length, a line per provider."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import records
from benchmarks.plots.style import STYLES, describe_machine, save_png

Row = dict[str, str]

LEAST_POINTS = 3
"""Minimum number of row lengths of a series."""


def iterate_series(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(file stem, title, rows) of every plot of the rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["layout"] != "rows" or not row["of_copy"] or _get_cols(row) % 2:
            continue
        extent = "x of 256 MiB" if records.is_sweep_row(row) else f"{row['shape'].split('x')[0]} rows"
        groups.setdefault((row["op"], row["pass"], row["variant"], row["dtype"], extent), []).append(row)
    for (op, pass_, variant, dtype, extent), group in groups.items():
        if len({_get_cols(row) for row in group}) < LEAST_POINTS:
            continue
        stem = f"{op}-{pass_}-{variant}-{dtype}" + ("" if "rows" not in extent else "-" + extent.replace(" ", "-"))
        yield stem, f"{op} {pass_}, {variant}, {dtype}, {extent}", group


def draw_series(rows: list[Row], title: str, path: Path) -> None:
    """Write one plot as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for provider, style in STYLES.items():
        # If several files have a cell, for example the copy of each run, the first one counts.
        points = {_get_cols(row): int(row["gbps"]) for row in reversed(rows) if row["provider"] == provider}
        if points:
            lengths, rates = zip(*sorted(points.items()), strict=True)
            axes.plot(lengths, rates, label=provider, **{"markersize": 4, "linewidth": 1.3, **style})
    shortest, longest = min(map(_get_cols, rows)), max(map(_get_cols, rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 << k for k in range(longest.bit_length()) if 1 << k >= shortest])
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:.0f}" if n < 1 << 20 else f"{n / (1 << 20):.0f} Mi")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, elements in a row")
    axes.set_ylabel("GB/s by the fewest bytes")
    axes.set_title(f"{title}\n{describe_machine(rows)}", fontsize=10)
    axes.grid(color="0.9")
    figure.legend(loc="outside right upper", fontsize=8)
    save_png(figure, path)
    pyplot.close(figure)


def _get_cols(row: Row) -> int:
    return int(row["shape"].split("x")[1])
