"""The compose stack: Prometheus finds the server by its name, and counts what was asked of it.

Debian's Prometheus stands in for the image that the compose file names.  Grafana, of which there is no package, is
left out; its dashboard, data source and rules are tested in tests/docker.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from .engine import podman

FILE = Path(__file__).parents[2] / "docker/compose.yaml"
SERVICES = ("normserve", "prometheus")
PROJECT = yaml.safe_load(FILE.read_text(encoding="utf-8"))["name"]
SERVER, PROMETHEUS = "http://127.0.0.1:8000", "http://127.0.0.1:9090"


def compose(*arguments):
    program = Path(sys.executable).with_name("podman-compose")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NORMSERVE_")}
    command = [program, "--in-pod", "false", "--file", FILE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr


def is_ready(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def stack(until):
    try:
        compose("up", "--detach", *SERVICES)
        until(lambda: is_ready(f"{SERVER}/readyz"), 120)
        until(lambda: is_ready(f"{PROMETHEUS}/-/ready"))
        yield
    finally:
        compose("down", "--volumes")


def asked(path, **parameters):
    answer = httpx.get(f"{PROMETHEUS}/api/v1/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def values(query):
    return [float(each["value"][1]) for each in asked("query", query=query, time=str(time.time()))["result"]]


def test_prometheus_scrapes_the_server_and_counts_its_bytes(stack, until):
    sample = httpx.get(f"{SERVER}/sample.npy").content
    bytes_of_kernels = 0
    for _ in range(3):
        answer = httpx.post(f"{SERVER}/v1/layer_norm", content=sample)
        assert answer.status_code == 200
        bytes_of_kernels += int(answer.headers["x-kernel-bytes"])
    assert bytes_of_kernels > 0
    until(lambda: values('normserve_kernel_bytes_total{op="layer_norm",pass="forward"}') == [bytes_of_kernels])
    (target,) = asked("targets")["activeTargets"]
    assert (target["health"], target["labels"]["instance"]) == ("up", "normserve:8000")
    assert values('normserve_requests_total{op="layer_norm"}') == [3]


def test_rules_are_loaded_and_nothing_alerts(stack, until):
    groups = asked("rules")["groups"]
    assert {Path(group["file"]).name for group in groups} == {file.name for file in FILE.parent.glob("rules/*.yml")}
    # A server that was scraped before it was ready is on its way to an alert until the rules are looked at again.
    until(lambda: asked("alerts")["alerts"] == [], 60)


def test_the_server_may_write_nothing_and_ends_with_0(stack, until):
    container = podman("ps", "--all", "--quiet", "--filter", f"name={PROJECT}_normserve")
    assert podman("inspect", "--format", "{{.HostConfig.ReadonlyRootfs}}", container) == "true"
    assert podman("inspect", "--format", "{{.EffectiveCaps}}", container) == "[]"
    compose("stop", "normserve")
    assert podman("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    # Tests after this one find it as those before did.
    compose("start", "normserve")
    until(lambda: is_ready(f"{SERVER}/readyz"), 120)
