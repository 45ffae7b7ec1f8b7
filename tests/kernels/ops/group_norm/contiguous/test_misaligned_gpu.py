"""Groups that start between multiples of 16 bytes, read and written in place, match the oracle."""

import fusednorm
import pytest
import torch
from fusednorm import reference
from fusednorm.results import Forward

from tests.kernels.harness.misaligned import misaligned

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((4, 64, 32, 32), 8),
        ((4, 320, 64, 64), 32),
        ((1, 64, 128, 128), 4),
        ((2, 15, 61, 67), 3),
        ((1, 8, 512, 512), 1),
    ],
)
@pytest.mark.parametrize("given", ["x", "out", "both"])
def test_groups(shape, groups, dtype, given, device):
    x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    if given != "out":
        x = misaligned(shape, dtype, device)
    if given != "x":
        y = misaligned(shape, dtype, device)
    result = fusednorm.group_norm_forward(x, groups, stats=True, out=Forward(y))
    exact = reference.group_norm_forward(x, groups, stats=True, precision=torch.float64)
    assert result.y is y
    torch.testing.assert_close(result.rstd.double(), exact.rstd, rtol=5e-6, atol=0)
    torch.testing.assert_close(result.mean.double(), exact.mean, rtol=0, atol=5e-6)
