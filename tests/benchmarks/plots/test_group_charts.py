from benchmarks.harness import records
from benchmarks.plots.group_charts import draw_chart, iterate_charts


def test_a_chart_for_each_variant_of_enough_shapes(path):
    assert [(stem, len(of)) for stem, _, of in iterate_charts(records.read_records([path]))] == [
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
    _, title, of = next(iterate_charts(records.read_records([path])))
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
