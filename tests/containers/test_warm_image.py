"""What the server compiles while it warms up is in the image that docker/warm-image.sh makes.

There is no GPU here: a stand-in for the compiler writes to the cache of the CPU image when Python starts.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from .conftest import IMAGE
from .engine import podman

ROOT = Path(__file__).parents[2]
WARMED = "localhost/normserve:warmed-for-a-test"
GPU = yaml.safe_load((ROOT / "docker/k8s/gpu/deployment.yaml").read_text(encoding="utf-8"))
COMPILER = """
import os, pathlib
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "A-KEY")
folder.mkdir(parents=True, exist_ok=True)
(folder / "kernel.cubin").write_text("compiled")
"""


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiler")
    folder.chmod(0o755)
    (folder / "sitecustomize.py").write_text(COMPILER, encoding="utf-8")
    flags = f"--health-interval disable --volume {folder}:/compiler:ro --env PYTHONPATH=/compiler"
    flags += " --env NORMSERVE_WARM_SIZES=768"
    environment = os.environ | {"ENGINE": "podman", "IMAGE": IMAGE, "TAG": WARMED, "RUN_FLAGS": flags}
    done = subprocess.run(
        ["docker/warm-image.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yield WARMED
    podman("rmi", WARMED)


def inspected(image):
    (found,) = json.loads(podman("image", "inspect", image))
    return found["Config"] | {"Healthcheck": found["Healthcheck"]}


def test_its_kernels_are_there_where_nothing_can_be_written(start, warmed):
    container = start("--env", "PYTHONPATH=", image=warmed)
    assert container.run("sh", "-c", "cat $TRITON_CACHE_DIR/A-KEY/kernel.cubin") == "compiled"
    assert container.stop() == 0


def test_it_is_otherwise_the_image_that_it_was_made_of(warmed):
    before, after = inspected(IMAGE), inspected(warmed)
    for kept in ("User", "Entrypoint", "Cmd", "Healthcheck", "StopSignal", "ExposedPorts", "WorkingDir"):
        assert after.get(kept) == before.get(kept), kept
    assert before["Labels"].items() <= after["Labels"].items()
    assert "NORMSERVE_WARM_SIZES=768" in after["Env"]
    assert set(before["Env"]) <= set(after["Env"])


def test_a_pod_puts_them_into_its_volume(warmed):
    (baking,) = GPU["spec"]["template"]["spec"]["initContainers"]
    (mount,) = baking["volumeMounts"]
    program, *arguments = baking["command"]
    volume = podman("volume", "create")
    try:
        run = ("run", "--rm", "--network", "none", "--read-only", "--volume")
        # A volume of a pod is its group's to write; this one is root's.
        podman(*run, f"{volume}:/v", "--user", "0", "--entrypoint", "chown", warmed, "10001", "/v")
        for _ in range(2):  # A second start of the pod finds what the first put there.
            podman(*run, f"{volume}:{mount['mountPath']}", "--entrypoint", program, warmed, *arguments)
        listed = podman(
            *run, f"{volume}:/v", "--entrypoint", "find", warmed, "/v", "-type", "f", "-printf", "%P %U"
        )
    finally:
        podman("volume", "rm", volume)
    assert re.fullmatch(r"triton/A-KEY/kernel.cubin 10001", listed)
