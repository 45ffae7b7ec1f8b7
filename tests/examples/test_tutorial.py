"""The tutorial, from its first command to its last, in the order in which a newcomer follows it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.integration.harness.servers import find_free_port

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
INSTALLATION_S = 1800


def snippets(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)
    assert found
    return found


def test_its_programs_run_one_after_another(url):
    namespace: dict[str, object] = {}
    for snippet in snippets("python"):
        exec(compile(snippet.replace(ADDRESS, url), "tutorial.md", "exec"), namespace)
    assert len(namespace["second"]) == 412
    namespace["client"].close()


@pytest.mark.slow
def test_its_commands_run(url, tool, tmp_path):
    tool("curl")
    started, sent, _, loaded = snippets("sh")
    assert started == "make serve\n"
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (sent, loaded):
        subprocess.run(
            ["sh", "-c", command.replace(ADDRESS, url)],
            cwd=tmp_path,
            env=os.environ | {"PATH": commands},
            check=True,
            capture_output=True,
        )
    np.testing.assert_allclose(np.load(tmp_path / "y.npy").mean(axis=-1), 0, atol=1e-5)


@pytest.fixture
def checkout(tool, tmp_path):
    """What a newcomer has: the repository's files, and no environment."""
    if not os.environ.get("CI"):
        pytest.skip("CI alone installs the server anew, which may download some GB: CI=true")
    for program in ("curl", "git", "make"):
        tool(program)
    folder = tmp_path / "normserve"
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    yield folder
    # Some GB, which pytest would keep.
    shutil.rmtree(folder)


@pytest.fixture
def served(checkout):
    """The address of a server that `make serve` alone has installed and started."""
    port = find_free_port()
    # Of the make that runs the tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    (command, *_) = snippets("sh")
    server = subprocess.Popen(
        ["sh", "-c", command],
        cwd=checkout,
        env=environment | {"NORMSERVE_PORT": str(port)},
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + INSTALLATION_S
        while not is_ready(url):
            assert server.poll() is None, "make serve has ended"
            assert time.monotonic() < end, "make serve takes too long"
            time.sleep(1)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALLATION_S)
def test_all_of_it_works_after_make_serve_alone(checkout, served):
    _, sent, entered, loaded = snippets("sh")
    assert entered == ". .venv/bin/activate\npython\n"
    programs = "".join(snippets("python"))
    followed = f"set -e\n{sent}{entered.rstrip()} - <<'END'\n{programs}END\n{loaded}".replace(ADDRESS, served)
    done = subprocess.run(["sh", "-c", followed], cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "block.0.norm" in done.stdout
    assert (checkout / "y.npy").exists()
