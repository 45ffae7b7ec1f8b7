import sys

import pytest

from benchmarks import plots, records
from benchmarks.cells import Cell
from benchmarks.group_charts import charts, draw_chart

SHAPES = ((2, 320, 64, 64), (8, 512, 64, 64), (1, 128, 20, 256, 256))


@pytest.fixture
def path(write_csv):
    """Three shapes in both layouts, two shapes of another variant, and rows."""
    silu = [
        Cell("group_norm", "forward", "silu", shape, 32, "bfloat16", layout)
        for shape in SHAPES
        for layout in ("nchw", "nhwc")
    ]
    plain = [Cell("group_norm", "forward", "plain", shape, 32, "bfloat16", "nchw") for shape in SHAPES[:2]]
    rows = [Cell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")]
    providers = {"copy": 1.0, "fusednorm": 0.9, "torch": 0.1, "compile": 0.4}
    return write_csv(*((c, name, value) for c in silu + plain + rows for name, value in providers.items()))


def test_a_chart_for_each_variant_of_enough_shapes(path):
    assert [(stem, len(of)) for stem, _, of in charts(records.read([path]))] == [
        ("group_norm-forward-silu-bfloat16", 24)
    ]


def test_a_chart_has_fractions_and_times_in_both_layouts(path, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    savefig = Figure.savefig

    def remember(figure, *args, **kwargs):
        drawn.extend(figure.axes)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    _, title, of = next(charts(records.read([path])))
    draw_chart(of, title, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "chart.png").stat().st_size < 60_000
    fractions, last_fractions, times, _ = drawn
    assert [bars.get_label() for bars in fractions.containers] == ["fusednorm", "torch", "compile"]
    assert [round(bar.get_height(), 3) for bar in last_fractions.containers[0]] == [0.9, 0.9, 0.9]
    assert [bars.get_label() for bars in times.containers] == ["copy", "fusednorm", "torch", "compile"]
    assert times.get_yscale() == "log"
    assert [label.get_text() for label in times.get_xticklabels()] == [
        "2\u00d7320\u00d764\u00d764g32",
        "8\u00d7512\u00d764\u00d764g32",
        "1\u00d7128\u00d720\u00d7256\u00d7256g32",
    ]


def test_charts_are_written_beside_plots(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plots", str(path), "--out", str(tmp_path / "out")])
    plots.main()
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / "group_norm-forward-silu-bfloat16.png")]
    assert (tmp_path / "out" / "group_norm-forward-silu-bfloat16.png").exists()
