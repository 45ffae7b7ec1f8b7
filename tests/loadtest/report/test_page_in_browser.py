"""The page in a browser: no label of a plot is cut off or overlaps another one."""

import itertools
import re
from dataclasses import replace

import pytest
from normload.measurements.loopback_echo import LoopbackEcho
from normload.measurements.results import PhaseResult
from normload.report import html_report

from tests.integration.harness.browser import browser
from tests.loadtest.conftest import made_result
from tests.sampling import mark_rest_slow

__all__ = ["browser"]

# Between labels of one line, in pixels: less reads as one label.
GAP = 4

# Of every canvas its texts since it was last cleared, with their corners in pixels of the canvas.
RECORD = """
  const texts = new Map();
  const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    texts.set(this.canvas, []);
    clearRect.apply(this, box);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right, actualBoundingBoxAscent: up,
      actualBoundingBoxDescent: down } = this.measureText(text);
    const corners = [{ x: x - left, y: y - up }, { x: x + right, y: y + down }].map(
      (corner) => this.getTransform().transformPoint(corner));
    const [xs, ys] = [corners.map((each) => each.x), corners.map((each) => each.y)];
    if (text && this.canvas.isConnected)
      texts.get(this.canvas)?.push({ text, left: Math.min(...xs), right: Math.max(...xs),
        top: Math.min(...ys), bottom: Math.max(...ys) });
    fillText.call(this, text, x, y);
  };
  window.labels = () => [...document.querySelectorAll(".uplot canvas")].map(
    (canvas) => ({ width: canvas.width, height: canvas.height, texts: texts.get(canvas) ?? [] }));
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A ramp of eleven phases, with everything that a page can show."""
    phases = []
    for number in range(11):
        rate = 1000.0 * (number + 1)
        latency_s = 0.0101 / (1 - 0.09 * number) if number < 10 else 2.5
        (one,) = made_result([latency_s] * 200 * (number + 1), errors=number).phases
        phases.append(
            PhaseResult(
                replace(one.phase, name=f"load {10 * number + 10}%", rate=rate), 11.3 * number, 10.0, one.tally
            )
        )
    result = made_result([], phases=phases, echo=LoopbackEcho(1000, 2, 1e7, 1e-4))
    file = tmp_path_factory.mktemp("page") / "a.html"
    file.write_text(html_report.render_html(result), "utf-8")
    return file


@pytest.fixture
def opened(file, browser):
    """Opens the page at a width and in a color scheme; what is wrong on it is an error."""
    contexts = []

    def visit(width, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        contexts[-1].add_init_script(RECORD)
        page = contexts[-1].new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        # uPlot draws in a microtask after the script.
        page.wait_for_timeout(100)
        return page

    errors = []
    yield visit
    for context in contexts:
        context.close()
    assert errors == []


@pytest.mark.parametrize(
    ("width", "scheme"), mark_rest_slow(itertools.product([1280, 400], ["light", "dark"]), together=1)
)
def test_labels_are_whole_and_apart(opened, width, scheme):
    shown = opened(width, scheme)
    plots = shown.evaluate("labels()")
    assert len(plots) == 8
    for plot in plots:
        assert len(plot["texts"]) > 6
        for text in plot["texts"]:
            assert text["left"] >= 0, text
            assert text["top"] >= 0, text
            assert text["right"] <= plot["width"], text
            assert text["bottom"] <= plot["height"], text
        for one, other in itertools.combinations(plot["texts"], 2):
            is_apart = (
                one["right"] + GAP <= other["left"]
                or other["right"] + GAP <= one["left"]
                or one["bottom"] <= other["top"]
                or other["bottom"] <= one["top"]
            )
            assert is_apart, (one, other)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width


def test_an_upper_bound_does_not_press_the_data_to_zero(opened):
    """The echo's bandwidth is more than a thousand times that of the run."""
    shown = opened(400)
    text = shown.inner_text("#plots")
    assert "Upper bound: 20.00 GB/s, the loopback echo." in text
    assert "Upper bound: 5.00 GB/s, a copy on the device." in text
    labels = [each["text"] for each in shown.evaluate("labels()")[3]["texts"]]
    assert sum(re.fullmatch(r"0\.00\d+", label) is not None for label in labels) >= 2
