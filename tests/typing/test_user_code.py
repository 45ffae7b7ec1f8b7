"""The installed package's annotations accept right calls of users and refuse wrong ones."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("calls.py")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def python(tmp_path):
    """An interpreter with the wheels, and the packages of this one."""
    build = "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path
    # A copy: a build leaves its traces beside the sources, and other tests read these.
    kernels = shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    subprocess.run([sys.executable, "-m", *build, ROOT, kernels], check=True)
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for path in tmp_path.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(packages)
    (packages / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return tmp_path / "venv" / "bin" / "python"


def errors_in(output):
    """The line and the code of each error."""
    return set(re.findall(rf"{CALLS.name}:(\d+): error: .*\[([\w-]+)\]", output))


@pytest.mark.timeout(600)
def test_mypy_finds_the_wrong_calls_alone(python, tmp_path):
    lines = CALLS.read_text().splitlines()
    wrong = {(str(number), line.partition("# E: ")[2]) for number, line in enumerate(lines, 1) if "# E: " in line}
    options = (
        "--strict",
        "--python-executable",
        python,
        "--cache-dir",
        tmp_path / "cache",
        "--no-warn-unused-ignores",
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--config-file", "/dev/null", CALLS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert errors_in(checked.stdout) == wrong, checked.stdout + checked.stderr
