"""Chains of LayerNorms at the sizes of real work, which only a GPU computes in time."""

import pytest
import torch
from fusednorm import layer_norm_chain

from tests.kernels.ops.layer_norm.cases import DTYPES
from tests.kernels.ops.layer_norm.test_chain import check, make_chain
from tests.kernels.ops.layer_norm.test_gpu import COLS, LONG_COLS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cols", [*COLS, 1536, 7168, 10240])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_match_the_oracle(dtype, cols, device, poisoned):
    check(*make_chain(dtype, 333, cols, 3, device))


@pytest.mark.parametrize("norms", [1, 2, 5])
@pytest.mark.parametrize("cols", [256, 4096, 5120, 16384, 32768])
def test_any_number_of_norms_matches_the_oracle(cols, norms, device, poisoned):
    check(*make_chain(torch.bfloat16, 100, cols, norms, device))


@pytest.mark.parametrize("cols", [4096, 32768])
def test_eight_norms_match_the_oracle(cols, device, poisoned):
    check(*make_chain(torch.float32, 100, cols, 8, device))


@pytest.mark.parametrize("cols", [*LONG_COLS, 2**20 + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_match_the_oracle(dtype, cols, device, poisoned):
    check(*make_chain(dtype, 20, cols, 2, device))


@pytest.mark.parametrize("cols", [1000, 8192, 65536])
def test_more_than_two_to_the_31_elements(cols, device):
    rows = 2**31 // cols + 77
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device)
    weights = [torch.randn(cols, device=device)] * 2
    y = layer_norm_chain(x, weights, weights)
    assert torch.equal(y[-50:], layer_norm_chain(x[-50:], weights, weights))
