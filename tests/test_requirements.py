"""Each project that is imported is declared: what another brings along, its next version may not."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = (".", "kernels", "kernels/with-torch")
FOLDERS = ("kernels/fusednorm", "service", "loadtest", "benchmarks", "tests")
FOR_TYPE_CHECKERS = {"typing_extensions"}
"""Type checkers know it by themselves, and nothing imports it at run time."""

IMPORTED = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_imported_project_is_declared():
    projects = [tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in PROJECTS]
    requirements = [
        listed
        for project in projects
        for listed in (project["dependencies"], *project.get("optional-dependencies", {}).values())
    ]
    declared = {normalised(re.match(r"[\w.-]+", each)[0]) for listed in requirements for each in listed}
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    imported = {name for path in files for name in IMPORTED.findall(path.read_text())}
    imported -= FOR_TYPE_CHECKERS
    # Modules of the standard library, and projects that are not installed here, have no provider.
    providers = {name: set(map(normalised, each)) for name, each in packages_distributions().items()}
    assert {"torch", "starlette", "pytest"} <= imported & providers.keys()
    assert not {name for name in imported & providers.keys() if not providers[name] & declared}
