"""The live page: what it is made of, and what a browser makes of it under load."""

import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from normserve.http.routes.page import commands
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.integration.observability.load import drive
from tests.integration.wire import assert_problem
from tests.security.keys import INFER, METRICS, write_keys

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "service/normserve/http/page"
ASSETS = sorted(
    {file.name for file in FOLDER.rglob("*.*") if file.suffix != ".html"}
    | {"swagger-ui.css", "swagger-ui-bundle.js"}
)

# As Debian has it, and without what a browser asks the world for when it starts.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE_S = 20


# What it is made of


@pytest.mark.parametrize("name", ASSETS)
def test_asset_is_served(api, name):
    answer = api.get(f"/assets/{name}")
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = api.get(f"/assets/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name",
    ["nope.js", "index.html", "docs.html", "swagger-ui.js", "LICENSE", "..%2fpy.typed", "uplot%2fuPlot.min.css"],
)
def test_nothing_else_is(api, name):
    assert_problem(api.get(f"/assets/{name}"), 404, "not_found")


def test_nothing_on_it_is_inline_or_from_outside(api):
    answer = api.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert set(re.findall(r"(?:script|style|img|connect)-src ([^;]*)", policy)) == {"'self'"}
    assert "unsafe" not in policy
    assert not re.search(r"<style|<script(?![^>]* src=)| style=| on\w+=", answer.text)
    links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert links
    assert not [link for link in links if ":" in link or link.startswith("/")]


def test_lines_to_try_work(api, tmp_path, tool):
    tool("curl")
    page = api.get("/").text
    for line in commands(str(api.base_url).rstrip("/"), with_key=False):
        assert line.replace("&", "&amp;").replace("'", "&#x27;") in page
        few = line.replace("seq 500", "seq 2")
        # What curl says of a refusal is its exit code, if it is told to fail.
        shell = ["bash", "-o", "pipefail", "-c", few.replace("curl -s", "curl --fail -s")]
        subprocess.run(shell, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "y.npy").read_bytes().startswith(b"\x93NUMPY")


def test_host_is_no_markup(launched):
    with launched("--allowed-hosts", "*").client() as http:
        answer = http.get("/", headers={"host": "a<b>c"})
    assert answer.status_code == 200
    assert "<b>" not in answer.text


def test_locked_server_shows_it_and_how_to_give_the_key(launched):
    """It tells what /metrics tells, which asks for no key either."""
    locked = launched(env={"NORMSERVE_API_KEY": "s3cret-key"})
    with locked.client() as http:
        answer = http.get("/")
    assert answer.status_code == 200
    assert answer.text.count("Bearer $NORMSERVE_API_KEY") == 4
    assert "s3cret" not in answer.text


KEY_FORM = """
const listeners = {};
const element = () => ({ value: "", textContent: "", hidden: true });
const elements = { "key-form": element(), "key": element(), "key-hint": element() };
elements["key-form"].addEventListener = (event, call) => (listeners[event] = call);
const kept = new Map();
globalThis.document = { getElementById: (id) => elements[id] };
globalThis.sessionStorage = {
  getItem: (name) => kept.get(name) ?? null,
  setItem: (name, value) => kept.set(name, value),
  removeItem: (name) => kept.delete(name),
};
const code = require("fs").readFileSync(process.argv[1]).toString("base64");
import(`data:text/javascript;base64,${code}`).then((page) => {
  const told = [];
  const tell = (what) =>
    told.push([what, page.isWaitingForKey(), page.credentials(), elements["key-hint"].textContent]);
  const type = (key) => {
    elements.key.value = key;
    listeners.submit({ preventDefault: () => told.push("kept on the page") });
  };
  tell("at first");
  if (page.isRefused({ status: 401 }) && page.isRefused({ status: 403 }) && !page.isRefused({ status: 503 }))
    page.askForKey("<b>none</b>");
  tell("refused");
  type("two\\nlines");
  tell("nonsense");
  type("  a-key ");
  tell("typed");
  page.askForKey("expired");
  tell("refused again");
  console.log(JSON.stringify(told));
});
"""


def test_the_form_asks_for_a_key_until_there_is_one(tool):
    """Without a browser: what its module does with the form, what it keeps, and what it sends."""
    command = [tool("node", "nodejs"), "--eval", KEY_FORM, str(FOLDER / "key.js")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [
        ["at first", False, {}, ""],
        ["refused", True, {}, "<b>none</b>"],
        "kept on the page",
        ["nonsense", True, {}, "A key has letters, digits and signs only."],
        "kept on the page",
        ["typed", False, {"authorization": "Bearer a-key"}, "A key has letters, digits and signs only."],
        ["refused again", True, {}, "expired"],
    ]


def test_page_is_counted_as_no_operation(api):
    for path in ("/", "/assets/live.js"):
        api.get(path)
    text = api.get("/metrics").text
    for route in ("page", "asset"):
        assert re.search(rf'^normserve_requests_total{{op="{route}",pass="none",.*code="200"}}', text, re.M)


def test_wheel_carries_it(tmp_path):
    """Built apart, since building leaves its traces beside the sources."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "service", tmp_path / "service", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    for name in ("kernels", "loadtest", "wheels"):
        (tmp_path / name).mkdir()
    build = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("normserve/http/page/")}
    files = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.is_file()}
    assert inside == {f"normserve/http/page/{name}" for name in files}


# What a browser makes of it


@dataclass
class Opened:
    """The page in a browser, and what it complained of or asked others for."""

    page: Page
    complaints: list[str]
    strangers: list[str]

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true; asked from outside, since the page's policy forbids `eval`."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never: {condition}"
            self.page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser(tool):
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=tool("chromium"), args=OPTIONS)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens a page: `visit(url, viewport=DESK, color_scheme="light")`; `metrics` in place of those."""
    contexts = []

    def opened(url: str, metrics: str | None = None, **options) -> Opened:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url) else found.strangers.append(asked.url))
        if metrics is not None:
            page.route("**/metrics", lambda route: route.fulfill(body=metrics))
        page.goto(url)
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def busy(launched):
    """A server under load until the module's end."""
    server = launched()
    ending = threading.Event()

    def load() -> None:
        while not ending.is_set():
            drive(server.url, None, 0)

    thread = threading.Thread(target=load)
    thread.start()
    yield server
    ending.set()
    thread.join()


LINES = {
    "kernel": {f"{op}_norm {way}" for op in ("layer", "rms", "group") for way in ("forward", "backward")}
    | {"roof"},
    "stages": {"recv", "parse", "queue", "copy_in", "kernel", "copy_out", "serialize", "send"},
    "latency": {"p50", "p99"},
    "requests": {"answered", "refused", "failed"},
    "end-to-end": {"tcp"},
}
FIGURES = {
    "#kernel": r"[\d.]+ [MG]B/s",
    "#share": r"\d+ % of the roof",
    "#end-to-end": r"[\d.]+ [kMG]B/s",
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
    number, unit = re.fullmatch(r"([\d.]+) (.)B/s", facts["Roof, a copy"]).groups()
    roof = float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[unit]
    assert roof == pytest.approx(info["copy_bandwidth_bytes_per_second"], rel=0.01)
    assert facts["In flight"] == "0, 0 B"
    assert "Processes" not in facts


def test_a_fleet_is_told_of_as_a_whole(server, visit):
    metrics = "".join(
        f'normserve_ready{{process="{index}"}} {ready}\n'
        f'normserve_process_up{{process="{index}"}} {up}\n'
        f'normserve_inflight_requests{{process="{index}"}} {inside}\n'
        for index, (ready, up, inside) in enumerate([(1, 1, 2), (1, 1, 3), (0, 0, 0)])
    )
    opened = visit(f"{server.url}/", metrics)
    opened.wait("document.querySelector('#facts tr')")
    assert opened.text("#state") == "2 of 3 processes are ready"
    facts = dict(row.split("\t", 1) for row in opened.text("#facts").splitlines())
    assert facts["Processes"] == "2 of 3 answer"
    assert facts["In flight"].startswith("5,")


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
