"""What a browser makes of the live page, under load and when something is wrong."""

import io
import re
import threading

import numpy as np
import pytest
from PIL import Image

from tests.integration.harness.browser import Opened, browser, visit
from tests.integration.observability.load import drive
from tests.security.keys import INFER, METRICS, write_keys

__all__ = ["browser", "visit"]

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture
def busy(start_server):
    """A server under load until the test's end."""
    server = start_server()
    ending = threading.Event()

    def load() -> None:
        # Several times in the second that passes between two looks of the page.
        while not ending.wait(0.3):
            drive(server.url, None, 0)

    thread = threading.Thread(target=load)
    thread.start()
    yield server
    ending.set()
    thread.join()


LINES = {
    "kernel": {f"{op}_norm {way}" for op in ("layer", "rms", "group") for way in ("forward", "backward")}
    | {"peak"},
    "stages": {"recv", "parse", "queue", "copy_in", "kernel", "copy_out", "resume", "serialize", "send"},
    "latency": {"p50", "p99"},
    "requests": {"answered", "refused", "failed"},
    "throughput": {"tcp"},
}
FIGURES = {
    "#kernel": r"[\d.]+ [MG]B/s",
    "#share": r"\d+ % of peak bandwidth",
    "#throughput": r"[\d.]+ [kMG]B/s",
    "#requests": r"[\d.]+ /s",
    "#latency": r"[\d.]+ (µs|ms|s)",
    "#tail": r"median; p99 [\d.]+ (µs|ms|s)",
}
LEGEND = """element => [...element.querySelectorAll("tr.u-series")].slice(1).map(
  (row) => [".u-label", ".u-value"].map((cell) => row.querySelector(cell).innerText.trim()))"""


def coloured(picture: bytes) -> int:
    """How many pixels of a screenshot are of some colour: neither background nor grid, nor letters."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    return int(np.count_nonzero(pixels.max(axis=2) - pixels.min(axis=2) > 60))


def assert_shown(opened: Opened, viewport: dict[str, int], scheme: str) -> None:
    """Figures, plots and legends, within the width of the screen."""
    assert opened.text("#state") == "ready"
    for figure, pattern in FIGURES.items():
        assert re.fullmatch(pattern, opened.text(figure)), opened.text(figure)
    for plot, lines in LINES.items():
        element = opened.page.locator(f"#plot-{plot}")
        legend = dict(element.evaluate(LEGEND))
        assert legend.keys() == lines
        assert all(re.match(r"[\d.]+ ", value) for value in legend.values()), legend
        canvas = element.locator("canvas")
        assert coloured(canvas.screenshot()) > 100
        assert canvas.bounding_box()["width"] <= viewport["width"]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    shade = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", shade))) < 200) == (scheme == "dark")


def test_under_load_everything_is_shown(busy, visit):
    """On a desk in both colours, and on a phone; the page follows a change of either."""
    opened = visit(f"{busy.url}/", viewport=DESK, color_scheme="light")
    opened.wait("document.querySelector('#plot-kernel canvas')")
    # Some seconds, so that lines are more than points.
    opened.page.wait_for_timeout(4500)
    assert_shown(opened, DESK, "light")

    marker = "document.querySelectorAll('#plot-latency .u-marker')[1].style.border"
    light = opened.page.evaluate(marker)
    opened.page.emulate_media(color_scheme="dark")
    opened.wait(f"{marker} !== {light!r}")
    assert_shown(opened, DESK, "dark")

    opened.page.set_viewport_size(PHONE)
    opened.wait(f"document.querySelector('#plot-kernel canvas').clientWidth < {PHONE['width']}")
    assert_shown(opened, PHONE, "dark")
    assert (opened.complaints, opened.strangers) == ([], [])


def test_facts_are_what_metrics_say(server, visit):
    opened = visit(f"{server.url}/", viewport=DESK)
    opened.wait("document.querySelector('#facts tr')")
    facts = dict(row.split("\t", 1) for row in opened.text("#facts").splitlines())
    with server.client() as http:
        info = http.get("/v1/info").json()
    assert facts["Device"] == info["device"]["name"]
    assert facts["Backend"] == "torch"
    number, unit = re.fullmatch(r"([\d.]+) (.)B/s", facts["Peak bandwidth"]).groups()
    peak = float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[unit]
    assert peak == pytest.approx(info["copy_bandwidth_bytes_per_second"], rel=0.01)
    assert facts["In flight"] == "0, 0 B"
    assert "Processes" not in facts
    assert "Shared memory" not in facts


def test_a_fleet_is_told_of_as_a_whole(server, visit):
    metrics = "".join(
        f'normserve_ready{{process="{index}"}} {ready}\n'
        f'normserve_process_up{{process="{index}"}} {up}\n'
        f'normserve_inflight_requests{{process="{index}"}} {inside}\n'
        f'normserve_local_connections{{process="{index}"}} {inside}\n'
        f'normserve_local_bytes{{process="{index}"}} {inside * 1_000_000}\n'
        for index, (ready, up, inside) in enumerate([(1, 1, 2), (1, 1, 3), (0, 0, 0)])
    )
    opened = visit(f"{server.url}/", metrics)
    opened.wait("document.querySelector('#facts tr')")
    assert opened.text("#state") == "2 of 3 processes are ready"
    facts = dict(row.split("\t", 1) for row in opened.text("#facts").splitlines())
    assert facts["Processes"] == "2 of 3 answer"
    assert facts["In flight"].startswith("5,")
    assert re.fullmatch(r"5[.\d]* MB, 5 connections", facts["Shared memory"])


def test_it_asks_for_a_key_where_metrics_do(launched, visit, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    server = launched("--api-keys-file", str(keys))
    opened = visit(f"{server.url}/")
    opened.wait("!document.querySelector('#key-form').hidden")
    assert "Authorization: Bearer KEY" in opened.text("#key-hint")
    for key, told in (("a-guess", "not one that the server knows"), (INFER, "needs the scope metrics")):
        opened.page.fill("#key", key)
        opened.page.press("#key", "Enter")
        opened.wait(f"document.querySelector('#key-hint').innerText.includes('{told}')")
    opened.page.fill("#key", METRICS)
    opened.page.press("#key", "Enter")
    opened.wait("document.querySelector('#state').innerText === 'ready'")
    assert opened.page.is_hidden("#key-form")
    assert opened.page.url == f"{server.url}/"


def test_it_works_behind_a_proxy(server, browser):
    """One that ends TLS and gives the server a path of its own."""
    with browser.new_context() as context, server.client() as http:
        page = context.new_page()
        asked = []

        def proxy(route) -> None:
            asked.append(route.request.url)
            answer = http.get(route.request.url.removeprefix("https://a.test/norm"))
            route.fulfill(status=answer.status_code, headers=dict(answer.headers), body=answer.content)

        page.route("https://a.test/norm/**", proxy)
        page.goto("https://a.test/norm/")
        page.locator("#facts tr").first.wait_for()
        assert page.inner_text("#state") == "ready"
        assert set(asked) >= {f"https://a.test/norm/{name}" for name in ("", "metrics", "assets/uPlot.min.css")}
        lines = page.locator("pre").all_inner_texts()
    assert all("https://a.test/norm/" in line and server.url not in line for line in lines)


def test_rates_and_quantiles(server, visit):
    """Between two readings whose answers are known; one of the counters started again in between."""
    opened = visit(f"{server.url}/")
    before = 'a_total{op="x",of="\\\\\\""} 5\na_total{op="y"} 100\nb_total{op="x"} 1\n'
    after = 'a_total{op="x",of="\\\\\\""} 11\na_total{op="y"} 3\nb_total{op="x"} 4\n'
    for le, was, now in (("1.0", 10, 12), ("2.0", 10, 20), ("+Inf", 10, 20)):
        before += f'c_bucket{{op="x",le="{le}"}} {was}\n'
        after += f'c_bucket{{op="x",le="{le}"}} {now}\n'
    told = opened.page.evaluate(
        """async ([before, after]) => {
          const { Interval, Reading } = await import("/assets/metrics.js");
          const [first, second] = [new Reading(before, 10), new Reading(after, 14)];
          const interval = new Interval(first, second);
          return {
            label: second.all("a_total")[0].labels.of,
            seconds: interval.seconds,
            growth: [...interval.growth("a_total", (labels) => labels.op)],
            ratio: [...interval.ratio("a_total", "b_total", (labels) => labels.op)],
            median: interval.quantile(0.5, "c", () => true),
            nothing: interval.quantile(0.5, "c", () => false),
          };
        }""",
        [before, after],
    )
    assert told == {
        "label": '\\"',
        "seconds": 4,
        "growth": [["x", 6], ["y", 3]],
        "ratio": [["x", 2]],
        "median": 1 + 3 / 8,
        "nothing": None,
    }


def test_a_server_that_goes_away_is_missed(start_server, visit):
    server = start_server()
    opened = visit(f"{server.url}/")
    opened.wait("document.querySelector('#state').innerText === 'ready'")
    server.stop()
    opened.wait("document.querySelector('#state').innerText === 'the server does not answer'")
    assert "bad" in opened.page.get_attribute("#state", "class")


def test_ticks_of_the_first_moments_are_times_of_now(server, visit):
    """Of one moment, of two, and of ten minutes: no tick at midnight, and none twice."""
    opened = visit(f"{server.url}/", viewport=PHONE, timezone_id="UTC")
    noon = 1_800_014_400
    ticks = opened.page.evaluate(
        """async (noon) => {
          const { Plot } = await import("/assets/plots.js");
          const texts = new Map();
          const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
          CanvasRenderingContext2D.prototype.clearRect = function (...box) {
            texts.set(this.canvas, []);
            clearRect.apply(this, box);
          };
          CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            texts.get(this.canvas)?.push(text);
            fillText.call(this, text, ...rest);
          };
          const plot = new Plot("plot-latency", String);
          const ticks = [];
          for (const moments of [1, 1, 298]) {
            for (let count = 0; count < moments; count++)
              plot.add(noon + 2 * plot.times.length, new Map([["p50", 1]]));
            await new Promise((resume) => setTimeout(resume, 100));
            ticks.push(texts.get(plot.plot.ctx.canvas).filter((text) => text.includes(":")));
          }
          return ticks;
        }""",
        noon,
    )
    assert len(ticks) == 3
    for shown in ticks:
        assert len(shown) >= 2
        assert len(set(shown)) == len(shown)
        assert all("11:58:00" < tick < "12:11:00" for tick in shown), shown
