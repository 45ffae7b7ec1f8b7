"""A plot of servers with HTTP processes: requests per second against the number of these processes."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.plots.style import save_png

Row = Mapping[str, str]

_NAMES = {2**12: "4 KiB", 2**20: "1 MiB", 2**24: "16 MiB"}


def is_front_end_csv(path: Path) -> bool:
    """Whether a CSV has such rows, and not those of kernels."""
    with path.open(newline="", encoding="utf-8") as file:
        return "front_ends" in next(csv.reader(file), ())


def iterate_plots(rows: Sequence[Row]) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """(file stem, title, rows) of the only plot of such rows."""
    if rows:
        yield "front-ends", "Requests a second over those without front ends", rows


def draw_front_ends(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the plot as a PNG: a line for each size and number of connections, medians of the rounds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for (nbytes, connections), points in _compute_lines(rows).items():
        size = _NAMES.get(nbytes, f"{nbytes} bytes")
        panel.plot(list(points), list(points.values()), marker="o", label=f"{size}, {connections} connections")
    counts = sorted({int(row["front_ends"]) for row in rows})
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.axhline(1.0, color="0.6", linewidth=0.8)
    panel.set_xlabel("front ends")
    panel.set_ylabel("requests a second over none's")
    panel.set_ylim(bottom=0)
    panel.grid(color="0.9")
    figure.suptitle(f"{title}\n{rows[0]['machine']}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    save_png(figure, path)
    pyplot.close(figure)


def _compute_lines(rows: Iterable[Row]) -> dict[tuple[int, int], dict[int, float]]:
    """By bytes and connections: for each number of front ends, the median of the ratios."""
    came: dict[tuple[int, int], dict[int, list[float]]] = {}
    for row in rows:
        line = came.setdefault((int(row["nbytes"]), int(row["connections"])), {})
        line.setdefault(int(row["front_ends"]), []).append(float(row["rate_over_none"]))
    return {kind: {count: median(line[count]) for count in sorted(line)} for kind, line in came.items()}
