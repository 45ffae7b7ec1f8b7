"""Exported programs are loaded after a bare import of the package, before or after that of torch."""

import subprocess
import sys

import fusednorm
import pytest
import torch

# Decompositions are traced: the implementations are first called with fake tensors.
_PROGRAM = """
import sys
import {first}
import {second}

program = torch.export.load(sys.argv[1])
assert "fusednorm.api.operators" not in sys.modules
x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
y = program.run_decompositions({{}}).module()(x)
y.square().sum().backward()
torch.save((y.detach(), x.grad), sys.argv[2])
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [("fusednorm", "torch"), pytest.param("torch", "fusednorm", marks=pytest.mark.slow)],
)
def test_an_exported_program_is_loaded(tmp_path, first, second):
    norm = torch.nn.Sequential(fusednorm.LayerNorm(4), fusednorm.RMSNorm(4, activation="silu"))
    x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
    torch.export.save(torch.export.export(norm, (x,)), tmp_path / "program.pt2")
    program = _PROGRAM.format(first=first, second=second)
    command = [sys.executable, "-c", program, tmp_path / "program.pt2", tmp_path / "results.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    y = norm(x)
    y.square().sum().backward()
    torch.testing.assert_close(torch.load(tmp_path / "results.pt"), (y.detach(), x.grad))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["api.operators", "launch.execution"])
def test_any_module_may_be_the_first_to_import_torch(module):
    program = f"import fusednorm.{module}, torch; print(torch.ops.fusednorm.layer_norm.default)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fusednorm.layer_norm.default\n"
