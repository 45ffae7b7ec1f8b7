"""Plots of models: the time of a pass against the batch size, and its ratio to torch's; a line per provider."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness.records import MODEL
from benchmarks.plots.style import STYLES, describe_machine, save_png

Row = dict[str, str]

LEAST_BATCHES = 3
"""Minimum number of batch sizes of a plot."""


def iterate_curves(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(file stem, title, rows) of every plot of the rows: a model with several batch sizes."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["op"] == MODEL and row["ms_p50"]:
            of_one = row["shape"].partition("x")[2]
            groups.setdefault((row["layout"], of_one, row["pass"], row["variant"]), []).append(row)
    for (model, of_one, pass_, variant), group in groups.items():
        if len({_get_batch(row) for row in group}) >= LEAST_BATCHES:
            times = of_one.replace("x", "\u00d7")
            title = f"{model}, {pass_}, {variant}, batches of N\u00d7{times}"
            yield f"model-{model}-{of_one}-{pass_}-{variant}", title, group


def draw_curve(rows: list[Row], title: str, path: Path) -> None:
    """Write one plot as a PNG; below 1 in its lower half, a provider is faster than torch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (times, ratios) = pyplot.subplots(2, 1, figsize=(7.2, 5.6), sharex=True, layout="constrained")
    of_torch = _compute_points(rows, "torch")
    for provider, style in STYLES.items():
        points = _compute_points(rows, provider)
        if not points:
            continue
        look = {"markersize": 4, "linewidth": 1.3, **style}
        times.plot(list(points), list(points.values()), label=provider, **look)
        both = [batch for batch in points if batch in of_torch]
        ratios.plot(both, [points[batch] / of_torch[batch] for batch in both], **look)
    times.set_yscale("log")
    times.set_ylabel("milliseconds")
    ratios.set_ylabel("time over torch's")
    ratios.set_xlabel("N, size of the batch")
    ratios.set_xscale("log", base=2)
    batches = sorted({_get_batch(row) for row in rows})
    ratios.set_xticks(batches, [str(batch) for batch in batches])
    ratios.minorticks_off()
    for panel in (times, ratios):
        panel.grid(color="0.9")
    figure.suptitle(f"{title}\n{describe_machine(rows)}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    save_png(figure, path)
    pyplot.close(figure)


def _compute_points(rows: list[Row], provider: str) -> dict[int, float]:
    """Milliseconds by batch, in order."""
    points = {_get_batch(row): float(row["ms_p50"]) for row in reversed(rows) if row["provider"] == provider}
    return dict(sorted(points.items()))


def _get_batch(row: Row) -> int:
    return int(row["shape"].partition("x")[0])
