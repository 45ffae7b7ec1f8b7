"""What works where Triton is not installed: functions and modules on a CPU, the reference and the server."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys

sys.modules["triton"] = None  # As if it were not there.
import fusednorm
import torch
from fusednorm import reference
from normserve.backends.cpu.backend import CpuBackend

assert all(hasattr(fusednorm, name) for name in fusednorm.__all__)
x = torch.randn(4, 8, requires_grad=True)
for module in (fusednorm.LayerNorm(8), fusednorm.RMSNorm(8, activation="silu"), fusednorm.GroupNorm(2, 8)):
    module(x).sum().backward()
added = [call(x, x) for call in (fusednorm.add_layer_norm, fusednorm.add_rms_norm)]
added.append(fusednorm.add_group_norm(x, x, 2, scale=x, dropout=0.5))
assert all(torch.equal(sums.residual_out, 2 * x) for sums in added)
assert torch.vmap(fusednorm.layer_norm)(x).shape == x.shape
assert fusednorm.layer_norm(x.to("meta")).is_meta
y = reference.layer_norm_forward(x, dropout=0.5, seed=1, activation="gelu").y
assert y.shape == x.shape

kernels = [name for name in fusednorm.__all__ if name.endswith(("_forward", "_backward", "_chain"))]
assert len(kernels) == 7
for name in (*kernels, "warmup", "warmup_group_norm"):
    try:
        getattr(fusednorm, name)(x)
    except ModuleNotFoundError as error:
        assert str(error).startswith(f"fusednorm.{name} runs Triton kernels, and Triton is not installed"), error
        assert error.name == "triton"
    else:
        raise AssertionError(name)
# Every operation, direction and dtype.
print(CpuBackend().start().kind)
"""

_COMPILED = """
import sys

sys.modules["triton"] = None
import fusednorm
import torch

x = torch.randn(4, 8, requires_grad=True)
compiled = torch.compile(fusednorm.LayerNorm(8), backend="aot_eager", fullgraph=True)
compiled(x).sum().backward()
print("compiled")
"""


@pytest.mark.slow
def test_modules_are_compiled_by_torch():
    done = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled\n"


def test_functions_modules_the_reference_and_the_cpu_backend_work():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpu\n"
