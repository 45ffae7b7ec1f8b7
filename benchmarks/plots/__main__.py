"""Benchmarks' CSVs as plots.

    python -m benchmarks.plots benchmarks/results/plain.csv [more.csv ...] --out docs/plots

One PNG for each operation, pass, variant and dtype.  Rows: GB/s against the row length with a line per provider and
the copy's rate, for the sweep with x of 256 MiB and for every series with the same number of rows; row lengths with
an odd number of elements, which vector accesses do not fit, are only in the tables.  Groups: the fraction of a copy
and the time of each shape, with a bar per provider, in both layouts (`charts`).  Models: the time of a pass against
the batch size, and its ratio to torch's (`models`).  Servers: requests per second against the number of HTTP
processes (`front_ends`).
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
