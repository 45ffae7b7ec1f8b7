"""What the live page is made of."""

import html
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from normserve.http.routes.page_routes import list_example_commands
from normserve.metrics.request_metrics import STAGES

from tests.integration.harness.wire import assert_problem

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "service/normserve/http/page"
ASSETS = sorted(
    {file.name for file in FOLDER.rglob("*.*") if file.suffix != ".html"}
    | {"swagger-ui.css", "swagger-ui-bundle.js"}
)


def test_every_stage_has_a_colour_in_both_schemes():
    stages = re.search(r"STAGES = \[(.*?)\];", (FOLDER / "live.js").read_text(encoding="utf-8"), re.DOTALL)[1]
    assert tuple(re.findall(r'"(\w+)"', stages)) == STAGES
    numbers = list(map(str, range(len(STAGES))))
    light, dark = (FOLDER / "live.css").read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)")
    for scheme in (light, dark):
        assert re.findall(r"--series-(\d+): #[0-9a-f]{6};", scheme) == numbers


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
    for line in list_example_commands(str(api.base_url).rstrip("/"), with_key=False):
        assert html.escape(line) in page
        few = line.replace("seq 500", "seq 2")
        subprocess.run(["sh", "-c", few], cwd=tmp_path, check=True, capture_output=True)
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
    for name in ("loadtest", "wheels"):
        (tmp_path / name).mkdir()
    build = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("normserve/http/page/")}
    files = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.is_file()}
    assert inside == {f"normserve/http/page/{name}" for name in files}
