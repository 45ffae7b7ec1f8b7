"""Benchmarks' CSVs as plots.

    python -m benchmarks.plots benchmarks/results/plain.csv [more.csv ...] --out docs/plots

One PNG for each operation, pass, variant and dtype.  Of rows, GB/s against the row length, a line a provider, the
copy's own rate above them: of the sweep with x of 256 MiB, and of every series with the same number of rows.  Rows
of an odd number of elements, which no vector access fits, are left to the tables.  Of groups, the fraction of a
copy and the time of each shape, a bar a provider, in both layouts (`charts`).  Of models, the time of a pass over
the size of the batch, and over torch's (`models`).  Of servers, requests a second over the number of processes that
speak HTTP (`front_ends`).
"""

import argparse
from pathlib import Path

from benchmarks.harness import records
from benchmarks.plots.charts import charts, draw_chart
from benchmarks.plots.front_ends import draw_loads, is_of_front_ends, loads
from benchmarks.plots.models import curves, draw_curve
from benchmarks.plots.series import draw, series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    servers = [path for path in arguments.csv if is_of_front_ends(path)]
    rows = records.read([path for path in arguments.csv if path not in servers])
    plots = [(draw, *plot) for plot in series(rows)]
    plots += [(draw_chart, *chart) for chart in charts(rows)]
    plots += [(draw_curve, *curve) for curve in curves(rows)]
    for draw_one, stem, title, of_plot in plots:
        draw_one(of_plot, title, arguments.out / f"{stem}.png")
        print(arguments.out / f"{stem}.png")
    for stem, title, of_servers in [load for path in servers for load in loads(records.plain(path))]:
        draw_loads(of_servers, title, arguments.out / f"{stem}.png")
        print(arguments.out / f"{stem}.png")


if __name__ == "__main__":
    main()
