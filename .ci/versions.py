"""Tests the lowest and the newest versions of the packages that pyproject.toml declares, and newer Pythons.

For either it makes an environment below .venv, runs `make test-fast` in it, starts a server and sends it the
README's curl command.  torch and Triton are always those of constraints.txt: other builds of torch can be some GB,
and each is made for one Triton.  For that reason a newer Python tests what needs no torch: the client, which calls
a server of .venv.  Pythons that this machine does not have are left out.  An environment takes some GB of the disk:
it is removed when its tests have passed, and kept when they fail, so that one can look into it.

The newest JAX is tested, too, also one that pyproject.toml excludes.  Whether the tests pass with it is reported,
and fails nothing: each release of JAX may change how it launches kernels.

Usage: versions.py [lowest | newest | VERSION OF PYTHON | newest-jax] ...
"""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from find_python import JAX_VERSIONS, find_python
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
KERNELS = (f"{ROOT}/kernels", f"{ROOT}/kernels/with-torch")
"""The distributions that normserve's extras need, which are installed with it from this tree."""

VARIANTS = ("lowest", "newest", "3.12", "3.13", "newest-jax")
_OF_CONSTRAINTS = ("torch", "triton")
_COMMAND_S = 900
_START_S = 60


def main(variants: list[str]) -> None:
    for variant in variants or VARIANTS:
        if variant in ("lowest", "newest"):
            test_packages(variant)
        elif variant == "newest-jax":
            report_newest_jax()
        elif (python := find_python(variant)) is None:
            say(f"Python {variant} is left out: this machine does not have it")
        else:
            test_client(variant, python)


def test_packages(variant: str) -> None:
    """Run the fast tests and a server with the lowest or the newest versions."""
    say(f"the {variant} versions; {' and '.join(_OF_CONSTRAINTS)} are those of constraints.txt")
    folder = ROOT / ".venv" / variant
    with environment(folder, Path(sys.executable), constraints(variant), *KERNELS, f"{ROOT}[dev]"):
        run("make", "--assume-old=.venv/.dev", f"BIN={folder / 'bin'}", "test-fast")
        with server(folder / "bin" / "normserve") as port:
            run("bash", "-o", "pipefail", "-c", readme("sh", "sample.npy", port), cwd=folder)
    say(f"the {variant} versions pass the fast tests, and a server with them answers")


def test_client(version: str, python: Path) -> None:
    """Compile the source with another Python, and call a server with its client."""
    say(f"Python {version}, without torch: the client, and whether the source compiles")
    folder = ROOT / ".venv" / f"python{version}"
    with environment(folder, python, [], str(ROOT)):
        roots = ("kernels", "service", "loadtest", "benchmarks", "tests")
        run(folder / "bin" / "python", "-W", "error", "-m", "compileall", "-q", "-f", *roots)
        with server(ROOT / ".venv" / "bin" / "normserve") as port:
            run(folder / "bin" / "python", "-c", readme("python", "normserve.client", port))
    say(f"Python {version} compiles the source, and the client works with it; what needs torch is not tested")


def report_newest_jax() -> None:
    """Run the tests of JAX with its newest version, and print whether they pass."""
    python = find_python(*JAX_VERSIONS)
    if python is None:
        say(f"the newest JAX is left out: this machine has no Python {' or '.join(JAX_VERSIONS)}")
        return
    folder = ROOT / ".venv" / "newest-jax"
    also = ("jax", "triton", "pytest", "pytest-timeout")
    try:
        with environment(folder, python, constraints("newest"), KERNELS[0], also=also):
            run(folder / "bin" / "pip", "--disable-pip-version-check", "list")
            made = ("--assume-old=.venv/.dev", "--assume-old=.venv/jax/.done")
            run("make", *made, f"JAX_BIN={folder / 'bin'}", "test-jax")
    except (SystemExit, subprocess.TimeoutExpired) as failure:
        say(f"THE NEWEST JAX DOES NOT PASS, which fails nothing here: {failure}")
    else:
        say("the newest JAX passes the tests")


def declared() -> Iterator[Requirement]:
    """Every requirement of the projects and of their extras, without those on one another."""
    files = [Path(folder) / "pyproject.toml" for folder in (ROOT, *KERNELS)]
    projects = [tomllib.loads(path.read_text())["project"] for path in files]
    names = {project["name"] for project in projects}
    for project in projects:
        for requirements in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            yield from (each for each in map(Requirement, requirements) if each.name not in names)


def constraints(variant: str) -> list[str]:
    """The lines of a constraints file that makes pip install the lowest declared or the newest versions."""
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    lines = [str(requirement) for requirement in pinned if requirement.name in _OF_CONSTRAINTS]
    if variant == "lowest":
        lowest: dict[str, Version] = {}
        for requirement in declared():
            for bound in requirement.specifier:
                if bound.operator == ">=" and requirement.name not in _OF_CONSTRAINTS:
                    version = Version(bound.version)
                    lowest[requirement.name] = max(version, lowest.get(requirement.name, version))
        lines += [f"{name}=={version}" for name, version in lowest.items()]
    return lines


@contextlib.contextmanager
def environment(
    folder: Path, python: Path, constrained: list[str], *projects: str, also: tuple[str, ...] = ()
) -> Iterator[None]:
    """Make an environment anew, and remove it after the context; keep it if the context fails.

    pip fails if there is no version that is declared as the lowest.
    """
    run(python, "-m", "venv", "--clear", folder)
    listed = folder / "constraints.txt"
    listed.write_text("".join(f"{line}\n" for line in constrained))
    pip = folder / "bin" / "pip"
    options = ("--quiet", "--disable-pip-version-check", "--constraint", listed)
    run(pip, "install", *options, *(word for each in projects for word in ("--editable", each)), *also)
    yield
    shutil.rmtree(folder)


@contextlib.contextmanager
def server(normserve: Path) -> Iterator[int]:
    """Run a server until the end of the context, and yield its port as soon as it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen([normserve, "serve", "--port", str(port)], cwd=ROOT)
    try:
        end = time.monotonic() + _START_S
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"versions: expected a server that is ready within {_START_S} s, got none of {normserve}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    """Whether a server answers that it accepts requests."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as response:
        return bool(response.status == 200)
    return False


def readme(language: str, part: str, port: int) -> str:
    """Return the README's example in a language that has a text, for a server on a port."""
    examples: list[str] = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = (each for each in examples if part in each)
    return example.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, and end with an error if it fails or takes too long."""
    if status := subprocess.run(command, cwd=cwd, timeout=_COMMAND_S).returncode:
        sys.exit(f"versions: exit status {status} of {' '.join(map(str, command))}")


def say(text: str) -> None:
    """Print a line about the progress."""
    print(f"versions: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
