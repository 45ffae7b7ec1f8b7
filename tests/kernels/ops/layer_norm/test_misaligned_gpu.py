"""Rows that start between multiples of 16 bytes, read and written in place, match the oracle."""

import fusednorm
import pytest
import torch
from fusednorm import reference
from fusednorm.results import Forward

from tests.kernels.harness.misaligned import misaligned

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 1024), (64, 4096), (8, 65536), (3, 131072), (1, 1 << 20)])
@pytest.mark.parametrize("given", ["x", "out", "both"])
def test_rows(shape, dtype, given, device):
    x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    if given != "out":
        x = misaligned(shape, dtype, device)
    if given != "x":
        y = misaligned(shape, dtype, device)
    result = fusednorm.layer_norm_forward(x, stats=True, out=Forward(y))
    exact = reference.layer_norm_forward(x, stats=True, precision=torch.float64)
    assert result.y is y
    torch.testing.assert_close(result.rstd.double(), exact.rstd, rtol=5e-6, atol=0)
    torch.testing.assert_close(result.mean.double(), exact.mean, rtol=0, atol=5e-6)
