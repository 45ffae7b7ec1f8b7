"""One plot of servers with front ends, from the CSV as the benchmark writes it."""

import csv
import sys

import pytest

from benchmarks.plots.__main__ import main
from benchmarks.plots.front_end_plot import draw_front_ends, is_front_end_csv, iterate_plots
from benchmarks.serve.processes.frontends import COLUMNS


@pytest.fixture
def file(tmp_path):
    """Two rounds of none, one and two front ends; the second faster than the first."""
    path = tmp_path / "frontends.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, ("machine", *COLUMNS))
        writer.writeheader()
        for number, ratios in enumerate(((1.0, 1.5, 2.0), (1.0, 1.7, 2.4), (1.0, 9.0, 2.2))):
            for count, ratio in enumerate(ratios):
                row = {"machine": "a machine", "nbytes": 4096, "connections": 64, "front_ends": count}
                writer.writerow({**row, "round": number, "rate_over_none": ratio})
    return path


def test_a_line_has_the_medians_of_the_rounds(file, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    savefig = Figure.savefig

    def remember(figure, *args, **kwargs):
        drawn.extend(figure.axes)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    with file.open(newline="", encoding="utf-8") as rows:
        ((stem, title, of),) = iterate_plots(list(csv.DictReader(rows)))
    draw_front_ends(of, title, tmp_path / "plot.png")
    assert stem == "front-ends"
    (panel,) = drawn
    line = panel.get_lines()[0]
    assert line.get_label() == "4 KiB, 64 connections"
    assert list(line.get_xdata()) == [0, 1, 2]
    assert list(line.get_ydata()) == [1.0, 1.7, 2.2]
    assert (tmp_path / "plot.png").stat().st_size < 60_000


def test_it_is_written_beside_those_of_kernels(file, path, tmp_path, monkeypatch, capsys):
    assert is_front_end_csv(file)
    assert not is_front_end_csv(path)
    monkeypatch.setattr(sys, "argv", ["plots", str(path), str(file), "--out", str(tmp_path / "out")])
    main()
    assert str(tmp_path / "out" / "front-ends.png") in capsys.readouterr().out.split()
