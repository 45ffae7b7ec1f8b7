"""The three distributions: what each depends on, and what is in the files that a release uploads."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import normserve
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = {"normserve": "normserve", "fusednorm": "fusednorm", "fusednorm-core": "fusednorm_core"}
ADDRESS = "https://example.org/normserve"
PREPARE = ROOT / ".ci" / "prepare_distributions.py"
BUILD = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"

FOLDERS = runpy.run_path(str(PREPARE))["PROJECTS"]
PROJECTS = {
    project["name"]: project
    for folder in FOLDERS
    for project in [tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]]
}


def resolve(name, *extras):
    """The names of all that an installation brings, as far as these projects say."""
    found = set()
    waiting = [Requirement(f"{name}[{','.join(extras)}]")]
    while waiting:
        requirement = waiting.pop()
        found.add(requirement.name)
        if requirement.name in PROJECTS:
            project = PROJECTS[requirement.name]
            listed = [*project["dependencies"]]
            for extra in requirement.extras:
                listed += project["optional-dependencies"][extra]
            waiting += map(Requirement, listed)
    return found


def test_they_are_of_one_version_and_need_one_another_in_it():
    assert {PROJECTS[name]["version"] for name in ("fusednorm", "fusednorm-core")} == {normserve.__version__}
    pins = [
        str(each.specifier)
        for project in PROJECTS.values()
        for listed in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for each in map(Requirement, listed)
        if each.name in PROJECTS and each.name != project["name"]
    ]
    assert len(pins) >= 4
    assert set(pins) == {f"=={normserve.__version__}"}


def test_the_kernels_bring_nothing_of_the_service():
    assert resolve("fusednorm") == {"fusednorm", "fusednorm-core", "numpy", "torch", "triton"}
    assert resolve("fusednorm-core") == {"fusednorm-core", "numpy"}
    assert resolve("fusednorm-core", "jax") == {"fusednorm-core", "jax", "numpy", "triton"}


def test_the_client_needs_neither_kernels_nor_torch():
    assert resolve("normserve") == {
        *("normserve", "httpcore", "httptools", "httpx", "msgspec", "numpy", "sniffio"),
    }


def test_extras_are_names_of_the_kernels():
    client = resolve("normserve")
    assert resolve("normserve", "kernels") == client | resolve("fusednorm")
    assert resolve("normserve", "jax") == client | resolve("fusednorm-core", "jax")
    assert "triton" not in resolve("normserve", "server-cpu") >= resolve("fusednorm-core") | {"torch"}
    assert resolve("normserve", "server") >= resolve("fusednorm") | resolve("normserve", "server-cpu")


def test_their_metadata_agree():
    for key in ("requires-python", "license", "readme"):
        assert len({project[key] for project in PROJECTS.values()}) == 1
    classified = {tuple(line for line in each["classifiers"] if "Python ::" in line) for each in PROJECTS.values()}
    assert len(classified) == 1
    for folder in ("kernels", "kernels/with-torch"):
        assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the committed and the new files, prepared for a release."""
    copy = tmp_path_factory.mktemp("tree")
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    subprocess.run([sys.executable, PREPARE, copy, normserve.__version__, ADDRESS], check=True)
    return copy


def test_links_of_pages_lead_to_files_of_the_tag(tree):
    begin = re.compile(rf"{ADDRESS}/(?:blob|raw)/v{re.escape(normserve.__version__)}/([^#]+)")
    for page in ("README.md", "kernels/README.md", "kernels/with-torch/README.md"):
        text = (tree / page).read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        assert targets
        for target in targets:
            assert (ROOT / begin.match(target)[1]).exists(), target
    assert f"]({ADDRESS}/raw/v{normserve.__version__}/docs/live-page.png)" in (tree / "README.md").read_text(
        encoding="utf-8"
    )


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """The folder of wheels and source distributions, which setuptools builds one after another."""
    folder = tmp_path_factory.mktemp("dist")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in FOLDERS:
        command = [sys.executable, "-c", BUILD.format(str(folder))]
        subprocess.run(command, cwd=tree / name, env=environment, check=True, capture_output=True)
    return folder


def open_wheel(folder, name):
    (path,) = folder.glob(f"{FILES[name]}-{normserve.__version__}-*.whl")
    return zipfile.ZipFile(path)


def read_metadata(folder, name):
    with open_wheel(folder, name) as wheel:
        (file,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(wheel.read(file).decode())


def list_committed(*folders):
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}


@pytest.mark.slow
def test_each_wheel_has_its_packages_whole(built):
    contents = {}
    for name in PROJECTS:
        with open_wheel(built, name) as wheel:
            contents[name] = {file for file in wheel.namelist() if ".dist-info/" not in file}
    assert contents["fusednorm"] == set()
    kernels = {file.removeprefix("kernels/") for file in list_committed("kernels/fusednorm")}
    assert contents["fusednorm-core"] == kernels
    assert "fusednorm/host/extension/extension.cpp" in kernels
    service = {file.partition("/")[2] for file in list_committed("service/normserve", "loadtest/normload")}
    assert contents["normserve"] == service


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTS)
def test_metadata_are_those_of_an_index_page(built, name):
    metadata = read_metadata(built, name)
    assert (metadata["Name"], metadata["Version"]) == (name, normserve.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "LICENSE" in metadata.get_all("License-File")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Changelog", "Documentation", "Issues", "Repository"}
    assert urls["Repository"] == ADDRESS
    description = metadata.get_payload()
    assert description.startswith("# ")
    assert not re.search(r"\]\((?!https://)[^)]*\)", re.sub(r"```.*?```", "", description, flags=re.DOTALL))


@pytest.mark.slow
def test_source_distributions_have_tests_and_documents(built):
    def listed(name):
        with tarfile.open(built / f"{FILES[name]}-{normserve.__version__}.tar.gz") as archive:
            assert not [each.name for each in archive.getmembers() if each.issym() or each.islnk()]
            return {each.partition("/")[2] for each in archive.getnames()}

    everything = listed("normserve")
    hidden = {".dockerignore", ".git-blame-ignore-revs", ".gitignore", ".pre-commit-config.yaml", ".yamllint"}
    assert {file for file in list_committed() - everything - hidden if not file.startswith(".github/")} == set()
    built_before = re.compile(r"kernels/(docs|tests)(/|$)|kernels/.*\.egg-info/")
    assert not [file for file in everything if built_before.match(file)]
    kernels = listed("fusednorm-core")
    assert {f"kernels/{file}" for file in kernels} >= list_committed("kernels/fusednorm")
    assert kernels >= list_committed("docs", "tests/kernels", "tests/jax")
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= kernels
