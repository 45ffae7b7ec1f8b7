"""The CPU image, run: what is in it, what it says about itself, and how it ends."""

import json
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest
from normserve import __version__

from tests.integration.observability.load import GOOD

from .conftest import IMAGE
from .engine import podman
from .load import Ending, Load

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LABEL = "org.opencontainers.image"


@pytest.fixture(scope="module")
def configuration():
    (inspected,) = json.loads(podman("image", "inspect", IMAGE))
    return inspected["Config"]


def commit(form: str) -> str:
    command = ["git", "log", "-1", f"--format={form}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_labels_say_what_it_is_and_what_it_was_made_of(configuration):
    labels = configuration["Labels"]
    assert labels[f"{LABEL}.version"] == __version__
    assert labels[f"{LABEL}.licenses"] == PROJECT["license"]
    assert labels[f"{LABEL}.revision"] == commit("%H")
    assert labels[f"{LABEL}.created"] == commit("%cI")
    assert labels[f"{LABEL}.base.name"].startswith("docker.io/library/python:")


@pytest.mark.parametrize("user", ["10001:10001", "4242:4242"])
def test_every_operation_is_answered_whoever_it_runs_as(start, user):
    container = start("--user", user)
    assert container.run("id", "-u") == user.split(":")[0]
    with httpx.Client(base_url=container.url, timeout=60) as api:
        for path, params, media_type, body in GOOD:
            answer = api.post(path, params=params, content=body, headers={"content-type": media_type})
            assert answer.status_code == 200, (path, answer.text)
    assert container.stop() == 0


def test_nothing_that_installs_or_compiles_is_in_it(start):
    container = start()
    for program in ("pip", "gcc", "cc", "ptxas"):
        # The base has a pip of its own, of another Python's.
        found = container.run("sh", "-c", f"PATH=/opt/normserve/bin command -v {program} || echo none")
        assert found == "none"
    packages = container.run("python", "-c", "import importlib.util as u; print(u.find_spec('triton'))")
    assert packages == "None"


def test_a_stop_under_load_loses_no_admitted_request(start, until):
    container = start()
    connections = 16
    with Load(container.url, connections) as load:
        until(lambda: load.count()[Ending.ANSWERED] > 4 * connections)
        code = container.stop()
    assert code == 0, container.log
    drained = container.said("draining")
    assert load.lost(drained) == []
    # Most connections had a request inside at that moment.
    assert load.count(across=drained)[Ending.ANSWERED] >= connections // 2
