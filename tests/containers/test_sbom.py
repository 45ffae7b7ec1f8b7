"""The bill of materials that `make sbom` writes names what is in the CPU image, and nothing else."""

import json
from pathlib import Path

import pytest

from .conftest import IMAGE
from .engine import podman

FILE = Path(__file__).parents[2] / "dist/normserve-cpu.cdx.json"
_PACKAGES = "from importlib.metadata import distributions as d; print(*sorted({e.name for e in d()}), sep='\\n')"


@pytest.fixture(scope="module")
def bom():
    return json.loads(FILE.read_text(encoding="utf-8"))


def named(bom, prefix):
    return {each["name"] for each in bom["components"] if each.get("purl", "").startswith(prefix)}


def inside(*command):
    program, *arguments = command
    return set(podman("run", "--rm", "--network", "none", "--entrypoint", program, IMAGE, *arguments).splitlines())


def test_it_is_valid(bom):
    # Late: every run of the tests imports this module, and the validator's grammars take seconds to build.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = FILE.read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.from_version(bom["specVersion"])).validate_str(text) is None


def test_it_has_every_package_of_python(bom):
    found = inside("python", "-c", _PACKAGES)
    # Those of the tree, which no index has, have no address there.
    own = {"fusednorm-core", "normserve"}
    assert {*own, "torch"} <= found
    assert own <= {each["name"] for each in bom["components"]}
    assert named(bom, "pkg:pypi/") | own == found


def test_it_has_every_package_of_debian(bom):
    found = inside("dpkg-query", "--show", "--showformat", "${Package}\\n")
    assert {"libc6", "dpkg"} <= found
    assert named(bom, "pkg:deb/debian/") == found
