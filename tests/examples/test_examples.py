"""Every example runs as its text says."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program of examples as its command does; what it prints."""

    def program(name: str, *options: object) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *map(str, options)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return program


def losses(printed: str) -> tuple[float, float]:
    found = re.search(r"loss (\S+) -> (\S+) in 12 steps", printed)
    assert found, printed
    return float(found[1]), float(found[2])


def test_a_patched_model_learns_what_the_model_does(run):
    printed = run("patch_and_train.py", "--steps", 12)
    assert "patched 5, skipped 0" in printed
    first, last = losses(printed)
    assert last < 0.8 * first


@pytest.mark.parametrize("transport", ["http", "shared memory"])
def test_a_model_learns_over_the_service(run, url, socket, transport):
    where = url if transport == "http" else f"unix://{socket}"
    first, last = losses(run("train_over_service.py", "--url", where, "--steps", 12))
    assert last < 0.8 * first


def test_an_unmodified_tritonclient(run, url):
    printed = run("triton_client.py", "--address", url.removeprefix("http://"))
    mean, deviation = re.search(r"mean (\S+) at most, deviation (\S+)", printed).groups()
    assert float(mean) < 1e-5
    assert abs(float(deviation) - 1) < 1e-3


@pytest.mark.slow
def test_a_load_test_leaves_its_report_and_says_whether_objectives_were_met(url, tmp_path):
    scenario = (EXAMPLES / "load_test.toml").read_text().replace("duration_s = 5.0", "duration_s = 1.0")
    (tmp_path / "load_test.toml").write_text(scenario)
    script = tmp_path / "load_test.sh"
    script.write_text((EXAMPLES / "load_test.sh").read_text())
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(script), url, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    # 3: a loaded machine may answer late.
    assert done.returncode in (0, 3), done.stdout + done.stderr
    summary = json.loads((tmp_path / "load_test.json").read_text())["summary"]
    assert summary["sent_by_status"]["200"] > 0
    assert "p99" in (tmp_path / "load_test.html").read_text()


def test_every_example_is_in_the_list():
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name in listed or path.name in {"README.md", "__pycache__"}
