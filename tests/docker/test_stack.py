"""What the images and the stack around them say about the server is true of it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from normserve.jobs import Op
from normserve.metrics import Metrics
from normserve.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/normserve.json").read_text(encoding="utf-8"))
QUERIES = {
    f"{panel['title']}, {target['refId']}": target for panel in DASHBOARD["panels"] for target in panel["targets"]
}


def load(name):
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def series():
    """Names of the time series that the server exposes, each with its labels."""
    for metric in Metrics().catalogue:
        if metric.kind == "histogram":
            yield f"{metric.name}_bucket", {*metric.label_names, "le"}
            yield f"{metric.name}_sum", {*metric.label_names}
            yield f"{metric.name}_count", {*metric.label_names}
        else:
            yield metric.name, {*metric.label_names}


SERIES = dict(series())


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())
def test_query_asks_for_what_the_server_exposes(query):
    names = re.findall(r"\bnormserve_\w+", query["expr"])
    assert names
    unknown = set(names) - SERIES.keys()
    assert not unknown
    offered = set.union(*(SERIES[name] for name in names))
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", query["expr"]) for label in labels.split(", ")}
    assert grouped <= offered
    assert {*re.findall(r"{{(\w+)}}", query["legendFormat"])} <= grouped


def test_panels_stand_side_by_side():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_dashboard_offers_every_operation():
    (variable,) = DASHBOARD["templating"]["list"]
    assert variable["query"].split(",") == [op.value for op in Op]
    assert all(re.fullmatch(variable["allValue"], op.value) for op in Op)


def test_dashboard_finds_its_data_source_and_its_folder():
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]
    asked = {query["datasource"]["uid"] for query in QUERIES.values()}
    assert asked == {source["uid"]}

    (provider,) = load("grafana/provisioning/dashboards/normserve.yaml")["providers"]
    grafana = load("compose.yaml")["services"]["grafana"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


def test_services_reach_one_another_by_name_and_port():
    services = load("compose.yaml")["services"]
    (scrape,) = load("prometheus.yml")["scrape_configs"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    addresses = [*scrape["static_configs"][0]["targets"], source["url"].removeprefix("http://")]
    for host, port in (address.split(":") for address in addresses):
        assert any(published.endswith(f":{port}") for published in services[host]["ports"])


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_mounted_files_are_there(name):
    for service in load(name)["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists()


def test_images_of_others_are_pinned():
    for service in load("compose.yaml")["services"].values():
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_targets_are_stages_of_the_dockerfile(name):
    target = load(name)["services"]["normserve"]["build"]["target"]
    assert re.search(rf"^FROM \S+ AS {target}$", DOCKERFILE, re.MULTILINE)


def test_a_stop_waits_for_the_drain():
    patience = load("compose.yaml")["services"]["normserve"]["stop_grace_period"]
    assert int(patience.removesuffix("s")) > Settings.model_fields["drain_s"].default


def test_pythons_of_the_image_and_of_the_project_agree():
    images = set(re.findall(r"python:(\d+\.\d+)-slim-bookworm", DOCKERFILE))
    assert [f">={version}" for version in images] == [PROJECT["requires-python"]]


def test_image_carries_the_version_of_the_project():
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.MULTILINE)) == {PROJECT["version"]}


@pytest.mark.parametrize(
    "path", ["docker/Dockerfile", "docker/compose.yaml", "docker/healthcheck.py", "docs/deploying.md"]
)
def test_every_setting_that_is_named_exists(path):
    named = set(re.findall(r"\bNORMSERVE_([A-Z_]+)", (ROOT / path).read_text(encoding="utf-8")))
    assert named
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_what_the_dockerfile_copies_reaches_the_build():
    admitted = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = {
        name
        for arguments in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for name in arguments.split()
    }
    assert copied == admitted
