"""Every tensor that the packages make names its dtype and device: torch's defaults are the caller's."""

import ast
from pathlib import Path

import pytest

from tests.torch_defaults import FACTORIES

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels/fusednorm", "service/normserve", "loadtest/normload")
OF_DATA = ("as_tensor", "asarray")
"""The dtype is that of the data."""


def unnamed(source):
    """Lines of calls of torch's factories that leave a dtype or device to its defaults."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_torch = isinstance(owner, ast.Name | ast.Attribute) and ast.unparse(owner) in ("torch", "self._torch")
        named = {keyword.arg for keyword in node.keywords}
        needed = {"device"} if node.func.attr in OF_DATA else {"dtype", "device"}
        if is_torch and node.func.attr in FACTORIES and needed - named:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_new_tensor_names_its_dtype_and_device(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(f.relative_to(ROOT)): list(unnamed(f.read_text(encoding="utf-8"))) for f in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_calls_without_a_dtype_or_device_are_found():
    assert list(unnamed("torch.ones(2, dtype=d)")) == ["line 1: torch.ones(2, dtype=d)"]
    assert list(unnamed("self._torch.full((2,), 1.0, device=d)")) != []
    assert list(unnamed("torch.zeros(2, dtype=d, device=e); torch.as_tensor(a, device=e); x.new_ones(2)")) == []
