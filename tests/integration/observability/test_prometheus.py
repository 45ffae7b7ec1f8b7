"""Debian's Prometheus scrapes real servers under load: what it then knows is what was sent.

One server with both transports, and a fleet of two processes with a device and one that speaks HTTP for them.
`promtool` judges the page that they expose.
"""

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import pytest
from normload import cli

from tests.integration.harness.servers import ServerProcess
from tests.integration.observability.load import BAD, GOOD, Tally, drive, leave
from tests.integration.observability.prometheus import DOCKER, Prometheus, queries

WARM_S, LOAD_S = 0.5, 3.0
FLEET_WARM_REQUESTS, FLEET_REQUESTS = 4, 40
# No server here has keys.
OF_KEYS = {"Requests by key, A", "Bytes by key, A"}
HARNESS = """
warmup_s = 0.2

[workload]
max_mib = 0.1
pool = 20

[[phases]]
name = "calm"
arrivals = "constant"
rate = 100
duration_s = 1.2
"""


@dataclass
class Scene:
    """Servers after the load, and who watched.

    Attributes:
        kernels_before: bytes and seconds of kernels, each by operation and pass, when the load began.
        ended: when the last of the load had been scraped.
    """

    prometheus: Prometheus
    server: ServerProcess
    fleet: ServerProcess
    tally: Tally
    kernels_before: dict[str, dict[tuple[str, ...], float]]
    ended: float


@pytest.fixture(scope="module")
def scene(tool, launched, tmp_path_factory):
    program = tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    uds = folder / "normserve.sock"
    server = launched("--uds", str(uds), wait=False)
    fleet = launched("--devices", "cpu,cpu", "--frontends", "1", wait=False)
    for each in (server, fleet):
        each.wait_until_ready()
    # Whatever will be counted is there from the first scrape on, so that rates see all of the load; and it is far
    # enough from 0 that none of them takes the series to have begun a moment before.
    drive(server.url, uds, WARM_S)
    leave(server.address, Tally())
    ask(fleet, FLEET_WARM_REQUESTS)
    prometheus = Prometheus(program, folder, ["{}:{}".format(*each.address) for each in (server, fleet)])
    try:
        prometheus.wait_for_scrapes()
        before = prometheus.values(REQUESTS, "op", "code")
        kernels_before = {
            unit: prometheus.values(KERNELS.format(unit), "op", "pass") for unit in ("bytes", "seconds")
        }
        tally = drive(server.url, uds, LOAD_S)
        for _ in range(3):
            leave(server.address, tally)
        ask(fleet, FLEET_REQUESTS)
        # The second, so that rules have seen the first.
        prometheus.wait_for_scrapes(2)
        tally.codes.update({key: int(count) for key, count in before.items()})
        yield Scene(prometheus, server, fleet, tally, kernels_before, time.time())
    finally:
        prometheus.stop()


def ask(server: ServerProcess, count: int) -> None:
    """Send requests one after another, each on a connection of its own."""
    path, params, media_type, body = GOOD[0]
    for _ in range(count):
        with server.client() as api:
            api.post(path, params=params, content=body, headers={"content-type": media_type})


KERNELS = 'sum by (op, pass) (normserve_kernel_{}_total{{process=""}})'
REQUESTS = 'sum by (op, code) (normserve_requests_total{op=~".*_norm(_chain)?", process=""})'


def promtool_check(tool, text: str) -> None:
    done = subprocess.run(
        [tool("promtool", package="prometheus"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["server", "fleet"])
def test_promtool_has_no_complaint(scene, tool, name):
    promtool_check(tool, httpx.get(f"{getattr(scene, name).url}/metrics", verify=False).text)


def test_counters_equal_what_was_sent_by_code(scene):
    # Other tests may have sent more since.
    assert scene.prometheus.values(REQUESTS, "op", "code", at=scene.ended) == scene.tally.codes
    codes = {code for _, code in scene.tally.codes}
    assert codes == {"200", "400", "415", "422", "499", "504"}


@pytest.mark.usefixtures("load_test_forks")
def test_counters_equal_what_the_harness_sent(scene, tmp_path):
    (tmp_path / "own.toml").write_text(HARNESS)
    before = scene.prometheus.values(REQUESTS, "op", "code")
    command = ["run", str(tmp_path / "own.toml"), "--url", scene.server.url, "--processes", "1"]
    assert cli.main([*command, "--json", str(tmp_path / "told.json")]) == 0
    sent = json.loads((tmp_path / "told.json").read_text())["summary"]["sent_by_status"]
    scene.prometheus.wait_for_scrapes()
    grown = Counter()
    for (op, code), count in scene.prometheus.values(REQUESTS, "op", "code").items():
        grown[code] += int(count - before.get((op, code), 0))
    assert +grown == Counter({code: count for code, count in sent.items() if count})
    assert grown["200"] > 50


def test_mean_kernel_bandwidth_is_what_the_headers_said(scene):
    # Not increase(), which guesses at what lies between a scrape and the window's ends.
    grown = {
        unit: {key: value - before[key] for key, value in values.items()}
        for unit, before in scene.kernels_before.items()
        for values in (scene.prometheus.values(KERNELS.format(unit), "op", "pass", at=scene.ended),)
    }
    told = {key: grown["bytes"][key] / seconds for key, seconds in grown["seconds"].items()}
    said = scene.tally.kernels
    expected = {key: said[*key, "bytes"] / said[*key, "seconds"] for key in {key[:2] for key in said}}
    assert len(expected) == 6
    assert told == pytest.approx(expected, rel=0.02)


def test_a_fleet_is_one_target(scene):
    counted = scene.prometheus.values(
        'sum by (process) (normserve_requests_total{process!="",op="layer_norm"})', "process"
    )
    assert counted.keys() == {("0",), ("1",)}
    assert sum(counted.values()) == FLEET_WARM_REQUESTS + FLEET_REQUESTS
    assert set(scene.prometheus.values("normserve_process_up", "process").items()) == {(("0",), 1.0), (("1",), 1.0)}


def test_strangers_add_no_series(scene):
    """Whatever they ask for, once the answers that they can get have been counted."""
    count = 'count({__name__=~"normserve_.+",process=""})'

    def stray(api: httpx.Client, number: int) -> None:
        api.get(f"/a{number}?b={number}", headers={"x-request-id": f"r{number}", "user-agent": f"u{number}"})
        api.request(f"BREW{number}", f"/v1/layers/l{number}")
        api.delete(f"/v1/layers/l{number}")
        path, params, media_type, body = BAD[number % len(BAD)]
        api.post(path, params=params | {"layer": f"l{number}"}, content=body, headers={"content-type": media_type})
        api.get(f"/v1/layer_norm/{number}", headers={"accept": f"a/b{number}"})

    with scene.server.client() as api:
        for number in range(5):
            stray(api, number)
    scene.prometheus.wait_for_scrapes()
    before = scene.prometheus.query(count)
    with scene.server.client() as api:
        for number in range(5, 60):
            stray(api, number)
    scene.prometheus.wait_for_scrapes()
    assert scene.prometheus.query(count) == before


QUERIES = queries()


@pytest.mark.parametrize("name", sorted(QUERIES.keys() - OF_KEYS))
def test_panel_has_data_and_every_label_of_its_legend(scene, name):
    expr, labels = QUERIES[name]
    answer = scene.prometheus.query(expr, scene.ended)
    assert answer
    assert all(metric.get(label) for metric, _ in answer for label in labels)
    assert any(value == value for _, value in answer)


def test_stages_of_relayed_requests_explain_nearly_all_of_their_time(scene):
    """The sum of all stages, and that of durations, of results by front ends."""
    # Not increase(), which adds to each series another guess at what lies between a scrape and the window's ends.
    stages = 'sum(normserve_stage_duration_seconds_sum{process!=""})'
    requests = 'sum(normserve_request_duration_seconds_sum{process!="",op="layer_norm",code_class="2xx"})'
    (((), share),) = scene.prometheus.values(f"{stages} / {requests}", at=scene.ended).items()
    # Without those of front ends it was less than a half.
    assert 0.5 < share < 1


def test_the_share_of_peak_bandwidth_is_one(scene):
    """Small tensors stay in a cache, and so may pass it."""
    expr, _ = QUERIES["Of peak bandwidth, A"]
    ((_, share),) = scene.prometheus.query(expr, scene.ended)
    assert 0.001 < share < 20


def test_rules_are_evaluated(scene):
    rules = [rule for group in scene.prometheus.get("rules")["groups"] for rule in group["rules"]]
    texts = [file.read_text(encoding="utf-8") for file in (DOCKER / "rules").glob("*.yml")]
    written = [name for text in texts for name in re.findall(r"- (?:alert|record): (\S+)", text)]
    assert Counter(rule["name"] for rule in rules) == Counter(written)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for rule in rules:
        assert rule["type"] == "alerting" or scene.prometheus.query(rule["name"]), rule["name"]
