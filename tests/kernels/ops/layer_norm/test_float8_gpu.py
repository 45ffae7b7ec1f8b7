"""LayerNorm and RMSNorm into float8 at the sizes of real work, which only a GPU computes in time."""

import fusednorm
import pytest
import torch
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.tensors.arrays import FLOAT8

from tests.kernels.ops.layer_norm.cases import DTYPES, make_case
from tests.kernels.ops.layer_norm.test_float8 import check
from tests.kernels.ops.layer_norm.test_gpu import COLS, LONG_COLS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cols", [*COLS, 1536, 7168, 10240])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_many_rows_match_the_oracle(op, dtype, cols, device, poisoned):
    check(make_case(op, dtype, 333, cols, device))


@pytest.mark.parametrize("cols", [*LONG_COLS, 2**20 + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_match_the_oracle(dtype, cols, device, poisoned):
    check(make_case("layer_norm", dtype, 20, cols, device))


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("cols", [768, 7168, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_activations_match_the_oracle(dtype, cols, activation, device):
    check(make_case("layer_norm", dtype, 100, cols, device, residual=True, activation=activation))


def test_every_number_is_rounded_to_the_nearest_float8_ties_to_even(device):
    # One row of 1024 whose normalised values are its weight, over a scale of 1: all numbers, the points halfway
    # between two, and the float32 on either side of those.
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = numbers[torch.isfinite(numbers)].unique()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.full_like(halfway, side)) for side in (-500.0, 500.0)]
    values = torch.cat([numbers, halfway, *beside])
    weight = torch.zeros(1024, device=device)
    weight[: len(values)] = values
    x = torch.ones(1, 1024, device=device)
    y, *_, scale = fusednorm.rms_norm_forward(x, weight, eps=1e-30, out_dtype=FLOAT8)
    assert scale.item() == 1.0
    assert torch.equal(y.float(), weight.to(FLOAT8).float().unsqueeze(0))


@pytest.mark.parametrize("cols", [1000, 8192, 65536])
def test_more_than_two_to_the_31_elements(cols, device):
    rows = 2**31 // cols + 77
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device)
    weight = torch.randn(cols, device=device)
    together = fusednorm.layer_norm_forward(x, weight, weight, out_dtype=FLOAT8)
    last = fusednorm.layer_norm_forward(x[-50:], weight, weight, out_dtype=FLOAT8)
    assert torch.equal(together.y[-50:].view(torch.uint8), last.y.view(torch.uint8))
    assert torch.equal(together.y_scale[-50:], last.y_scale)
