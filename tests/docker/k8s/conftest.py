"""The manifests of each overlay, as kustomize renders them, and what they tell the server."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from normserve.settings import Settings

ROOT = Path(__file__).parents[3]
K8S = ROOT / "docker/k8s"
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
OVERLAYS = ["cpu", "gpu"]


@pytest.fixture(scope="session")
def dev_tool(tool):
    """Programs that the extra `dev` puts beside the interpreter."""

    def find(name: str) -> str:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return shutil.which(name, path=path) or tool.missing("pip install -c constraints.txt -e '.[dev]'")

    return find


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session", params=OVERLAYS)
def overlay(request):
    return request.param


@pytest.fixture(scope="session")
def rendered(dev_tool, overlay):
    return run(dev_tool("kubectl"), "kustomize", str(K8S / overlay))


@pytest.fixture(scope="session")
def manifests(rendered):
    found = list(yaml.safe_load_all(rendered))
    by_kind = {manifest["kind"]: manifest for manifest in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture(scope="session")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="session")
def container(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture(scope="session")
def settings(manifests, overlay):
    """What the server is told: by the image, and over it by the ConfigMap."""
    image = dict(re.findall(r"\bNORMSERVE_([A-Z_]+)=([^\s\\]+)", DOCKERFILE.split(" AS gpu\n")[0]))
    image["BACKEND"] = {"cpu": "torch", "gpu": "triton"}[overlay]
    configured = {name.removeprefix("NORMSERVE_"): value for name, value in manifests["ConfigMap"]["data"].items()}
    assert all(name.startswith("NORMSERVE_") for name in manifests["ConfigMap"]["data"])
    return Settings(**{name.lower(): value for name, value in (image | configured).items()})
