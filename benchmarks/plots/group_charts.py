"""Charts of GroupNorm: fraction of a copy and time of each shape, a bar per provider, a column per layout."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.plots.style import STYLES, describe_machine, save_png

Row = dict[str, str]

LEAST_SHAPES = 3
"""Minimum number of shapes of a chart."""

LAYOUTS = {"nchw": "contiguous", "nhwc": "channels-last"}


def iterate_charts(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(file stem, title, rows) of every chart of the rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["layout"] in LAYOUTS and row["of_copy"]:
            groups.setdefault((row["op"], row["pass"], row["variant"], row["dtype"]), []).append(row)
    for (op, pass_, variant, dtype), group in groups.items():
        if len({row["shape"] for row in group}) >= LEAST_SHAPES:
            yield f"{op}-{pass_}-{variant}-{dtype}", f"{op} {pass_}, {variant}, {dtype}", group


def draw_chart(rows: list[Row], title: str, path: Path) -> None:
    """Write one chart as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = pyplot.subplots(
        2, 2, figsize=(max(8.0, 0.9 * len(shapes) + 3.0), 6.4), sharex=True, sharey="row", layout="constrained"
    )
    for column, (layout, name) in enumerate(LAYOUTS.items()):
        of_layout = [row for row in rows if row["layout"] == layout]
        _draw_bars(panels[0][column], of_layout, shapes, "of_copy", 1.0)
        _draw_bars(panels[1][column], of_layout, shapes, "ms_p50", 1e3)
        panels[0][column].set_title(name, fontsize=10)
        panels[0][column].axhline(1.0, **STYLES["copy"])
        panels[1][column].set_yscale("log")
        labels = [shape.replace("x", "\u00d7") for shape in shapes]
        panels[1][column].set_xticks(range(len(shapes)), labels, rotation=40, ha="right", fontsize=8)
    panels[0][0].set_ylabel("fewest bytes, fraction of a copy")
    panels[1][0].set_ylabel("microseconds")
    figure.suptitle(f"{title}\n{describe_machine(rows)}", fontsize=10)
    handles, names = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    save_png(figure, path)
    pyplot.close(figure)


def _draw_bars(axes: Any, rows: list[Row], shapes: list[str], column: str, factor: float) -> None:
    """One panel: a group of bars for each shape; the copy's own bar only for columns with units, such as times."""
    providers = [p for p in STYLES if any(row["provider"] == p for row in rows)]
    if column == "of_copy":
        providers = [p for p in providers if p != "copy"]
    width = 0.8 / max(1, len(providers))
    for place, provider in enumerate(providers):
        values = {row["shape"]: factor * float(row[column]) for row in rows if row["provider"] == provider}
        offset = (place - (len(providers) - 1) / 2) * width
        axes.bar(
            [shapes.index(shape) + offset for shape in values],
            list(values.values()),
            width,
            label=provider,
            color=STYLES[provider]["color"],
        )
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
