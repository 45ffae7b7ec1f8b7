import pytest

from benchmarks.harness import records
from benchmarks.models.cells import ModelCell
from benchmarks.plots.model_plots import draw_curve, iterate_curves


@pytest.fixture
def rows(write_csv):
    """GPT-2 at three batches with a wrong one among Liger's, a model at one, and blocks of three sizes."""
    cells = [ModelCell("gpt2", (n, 512)) for n in (1, 16, 4)]
    timed = [(cell.make_row("step", "eager"), name, None) for cell in cells for name in ("fusednorm", "torch")]
    timed += [
        (cells[0].make_row("step", "eager"), "liger", "wrong"),
        (cells[1].make_row("step", "eager"), "liger", None),
    ]
    timed.append((ModelCell("bert", (1, 128)).make_row("step", "eager"), "torch", None))
    timed += [(ModelCell("blocks", (n, 8 * n)).make_row("step", "eager"), "torch", None) for n in (1, 2, 4)]
    return records.read_records([write_csv(*timed)])


def test_a_plot_for_each_model_of_enough_batches(rows):
    assert [(stem, len(of)) for stem, _, of in iterate_curves(rows)] == [("model-gpt2-512-step-eager", 7)]


def test_a_plot_has_times_and_ratios_in_order_of_the_batch(rows, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    savefig = Figure.savefig

    def remember(figure, *args, **kwargs):
        drawn.extend(figure.axes)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    _, title, of = next(iterate_curves(rows))
    draw_curve(of, title, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").stat().st_size < 60_000
    times, ratios = drawn
    assert [line.get_label() for line in times.lines] == ["fusednorm", "torch", "liger"]
    assert [list(line.get_xdata()) for line in times.lines] == [[1, 4, 16], [1, 4, 16], [16]]
    assert [list(line.get_ydata()) for line in ratios.lines] == [[1, 1, 1], [1, 1, 1], [1]]
