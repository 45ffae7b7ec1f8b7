"""Benchmarks' CSVs as plots.

    python -m benchmarks.plots benchmarks/results/plain.csv [more.csv ...] --out docs/plots

One PNG for each operation, pass, variant and dtype.  Rows: GB/s against the row length with a line per provider and
the copy's rate, for the sweep with x of 256 MiB and for every series with the same number of rows; row lengths with
an odd number of elements, which vector accesses do not fit, are only in the tables.  Groups: the fraction of a copy
and the time of each shape, with a bar per provider, in both layouts (`group_charts`).  Models: the time of a pass
against the batch size, and its ratio to torch's (`model_plots`).  Servers: requests per second against the number
of HTTP processes (`front_end_plot`).
"""

import argparse
from pathlib import Path

from benchmarks.harness import records
from benchmarks.plots.front_end_plot import draw_front_ends, is_front_end_csv, iterate_plots
from benchmarks.plots.group_charts import draw_chart, iterate_charts
from benchmarks.plots.model_plots import draw_curve, iterate_curves
from benchmarks.plots.row_plots import draw_series, iterate_series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    servers = [path for path in arguments.csv if is_front_end_csv(path)]
    rows = records.read_records([path for path in arguments.csv if path not in servers])
    plots = [(draw_series, *plot) for plot in iterate_series(rows)]
    plots += [(draw_chart, *chart) for chart in iterate_charts(rows)]
    plots += [(draw_curve, *curve) for curve in iterate_curves(rows)]
    for draw_one, stem, title, of_plot in plots:
        draw_one(of_plot, title, arguments.out / f"{stem}.png")
        print(arguments.out / f"{stem}.png")
    for stem, title, of_servers in [load for path in servers for load in iterate_plots(records.read_csv(path))]:
        draw_front_ends(of_servers, title, arguments.out / f"{stem}.png")
        print(arguments.out / f"{stem}.png")


if __name__ == "__main__":
    main()
