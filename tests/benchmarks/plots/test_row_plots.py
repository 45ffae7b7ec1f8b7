import pytest

from benchmarks.harness import records
from benchmarks.plots.row_plots import draw_series, iterate_series
from benchmarks.workload.benchmark_cells import KernelCell


@pytest.fixture
def rows(write_csv, sweep_cell):
    """A sweep in two dtypes, four providers; a series of 4096 rows; a cell that belongs to neither."""
    swept = [sweep_cell(cols, dtype) for dtype in ("bfloat16", "float32") for cols in (1001, 1024, 4096, 262144)]
    named = [
        KernelCell("layer_norm", "backward", "plain", (4096, n), 0, "float16", "rows") for n in (1024, 1536, 2048)
    ]
    alone = [KernelCell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")]
    providers = {"copy": 1.0, "fusednorm": 0.9, "torch": 0.5, "quack": 0.7}
    path = write_csv(*((cell, name, value) for cell in swept + named + alone for name, value in providers.items()))
    return records.read_records([path])


def test_a_plot_for_each_dtype_and_each_series(rows):
    assert [(stem, len(of)) for stem, _, of in iterate_series(rows)] == [
        ("layer_norm-forward-plain-bfloat16", 12),
        ("layer_norm-forward-plain-float32", 12),
        ("layer_norm-backward-plain-float16-4096-rows", 12),
    ]


def test_a_plot_is_a_small_png_with_a_line_for_each_provider(rows, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig

    def remember(figure, *args, **kwargs):
        drawn.append([line.get_label() for line in figure.axes[0].lines])
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    _, title, of = next(iterate_series(rows))
    draw_series(of, title, tmp_path / "plot.png")
    written = (tmp_path / "plot.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert len(written) < 60_000
    assert drawn == [["copy", "fusednorm", "torch", "quack"]]
