"""What the images and the stack around them say about the server is true of it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from normserve.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_FILES = ["compose.yaml", "compose.gpu.yaml", "compose.sidecar.yaml"]
SETTING = re.compile(r"\bNORMSERVE_([A-Z_]+)")
DOCUMENTS_WITH_SETTINGS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if SETTING.search(path.read_text(encoding="utf-8"))
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def load(name):
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def test_dashboard_finds_its_data_source_and_its_folder():
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]
    dashboard = json.loads((DOCKER / "grafana/dashboards/normserve.json").read_text(encoding="utf-8"))
    asked = {query["datasource"]["uid"] for panel in dashboard["panels"] for query in panel.get("targets", [])}
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


def test_both_ports_of_the_server_are_published_on_this_host_alone():
    service = load("compose.yaml")["services"]["normserve"]
    grpc_port = service["environment"]["NORMSERVE_GRPC_PORT"]
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in (Settings().port, grpc_port)]
    assert f"EXPOSE {Settings().port} {grpc_port}" in DOCKERFILE


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_mounted_files_are_there(name):
    for service in load(name)["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists()


def test_images_of_others_are_pinned():
    for service in load("compose.yaml")["services"].values():
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_targets_are_stages_of_the_dockerfile(name):
    target = load(name)["services"]["normserve"]["build"]["target"]
    assert re.search(rf"^FROM \S+ AS {target}$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.sidecar.yaml"])
def test_a_stop_waits_for_the_drain(name):
    patience = load(name)["services"]["normserve"]["stop_grace_period"]
    assert int(patience.removesuffix("s")) > Settings.model_fields["drain_s"].default


def test_pythons_of_the_image_and_of_the_project_agree():
    images = set(re.findall(r"python:(\d+\.\d+)-slim-bookworm", DOCKERFILE))
    assert [f">={version}" for version in images] == [PROJECT["requires-python"]]


def test_compose_files_are_valid():
    beside_python = Path(sys.executable).with_name("check-jsonschema")
    files = [DOCKER / name for name in COMPOSE_FILES]
    done = subprocess.run(
        [beside_python, "--builtin-schema", "vendor.compose-spec", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "docker/Dockerfile",
        "docker/compose.yaml",
        "docker/compose.sidecar.yaml",
        "docker/k8s/sidecar/deployment.yaml",
        "docker/healthcheck.py",
        *DOCUMENTS_WITH_SETTINGS,
    ],
)
def test_every_setting_that_is_named_exists(path):
    named = set(SETTING.findall((ROOT / path).read_text(encoding="utf-8")))
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
    # A file of a folder that is admitted may be copied by itself as well.
    inside = {name for name in copied if any(name.startswith(f"{folder}/") for folder in admitted)}
    assert copied - inside == admitted
