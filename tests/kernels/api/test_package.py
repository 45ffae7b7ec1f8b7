"""What the package shows of itself."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fusednorm
import pytest

_WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # As if it were not there.
import fusednorm

assert "triton" not in sys.modules
for name in sys.argv[1:]:
    try:
        getattr(fusednorm, name)
    except ModuleNotFoundError as error:
        assert str(error) == f"fusednorm.{name} needs torch: pip install fusednorm", error
        assert error.name == "torch"
        print(name)
fusednorm.allow_waiting(False)
fusednorm.require_batch_invariance(True)
assert issubclass(fusednorm.UnsupportedShapeError, fusednorm.KernelInputError)
assert fusednorm.Forward("y").rstd is None
fusednorm.__version__
"""


def test_it_lists_what_is_public():
    assert {"LayerNorm", "layer_norm_forward", "patch", "__version__"} <= set(dir(fusednorm))
    assert all(hasattr(fusednorm, name) for name in fusednorm.__all__)
    assert not {"operators", "TYPE_CHECKING", "metadata"} & set(dir(fusednorm))


def test_every_name_is_imported_from_where_type_checkers_see_it():
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(fusednorm)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = {
        alias.name: statement.module.removeprefix("fusednorm.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert imports.pop("reference") == "fusednorm"
    assert imports == fusednorm._MODULES
    assert sorted(imports) == fusednorm.__all__


def test_a_star_imports_all_of_it():
    names = {}
    exec("from fusednorm import *", names)
    assert names.keys() - {"__builtins__"} == set(fusednorm.__all__)
    assert names["layer_norm"] is fusednorm.layer_norm


def test_without_torch_it_is_imported_and_names_that_need_it_say_so():
    command = [sys.executable, "-c", _WITHOUT_TORCH, *fusednorm.__all__, "reference"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    works = {
        "ActivationName",
        "Added",
        "Backward",
        "Forward",
        "KernelInputError",
        "PatchReport",
        "UnsupportedShapeError",
        "allow_waiting",
        "require_batch_invariance",
    }
    assert set(done.stdout.split()) == {*fusednorm.__all__, "reference"} - works


def test_it_has_the_version_of_the_distribution():
    assert fusednorm.__version__ == metadata.version("fusednorm-core")
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        fusednorm.version  # noqa: B018


def test_a_tree_that_is_not_installed_has_no_known_version(monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert fusednorm.__version__ == "0+unknown"


def test_the_reference_has_every_module_with_a_public_function_or_class():
    page = Path(__file__).parents[3] / "docs/reference/fusednorm.md"
    described = set(re.findall(r"^::: fusednorm\.(\S+)", page.read_text(), re.MULTILINE))
    named = set(fusednorm._MODULES.values()) - {fusednorm._MODULES["ActivationName"]}
    assert named <= described
