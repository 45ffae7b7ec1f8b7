"""What stays where Triton is not installed: the reference, and with it the server on a CPU."""

import subprocess
import sys

_PROGRAM = """
import sys

sys.modules["triton"] = None  # As if it were not there.
import fusednorm
import torch
from fusednorm import reference
from normserve.backends.cpu.backend import TorchBackend

assert not hasattr(fusednorm, "layer_norm")
x = torch.randn(4, 64)
y = reference.layer_norm_forward(x, dropout=0.5, seed=1, activation="gelu").y
assert y.shape == x.shape
# Every operation, direction and dtype.
print(TorchBackend().start().kind)
"""


def test_the_reference_and_the_cpu_backend_work():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpu\n"
