"""Rows on which a careless variance fails: large means, no spread, the edge of float16, outliers."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import layer_norm_backward, layer_norm_forward, reference, rms_norm_forward

from tests.kernels.harness.accuracy import assert_close_to_oracle

COLS = (500, 9001)


def check(x):
    exact = reference.layer_norm_forward(x, precision=torch.float64).y
    assert_close_to_oracle(layer_norm_forward(x).y, exact.double(), F.layer_norm(x, x.shape[-1:]))


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("mean", [1e4, 1e6])
def test_large_mean_does_not_cancel(mean, cols, device):
    check(torch.randn(2, cols, device=device) + mean)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("first", [0.0, 1e3, -1e6])
def test_first_value_far_from_the_rest_does_not_cancel(first, cols, device):
    # The worst place for an outlier: it is its lane's pivot.  The number of chunks bounds what that costs.
    x = torch.randn(2, cols, device=device) + 3
    x[:, 0] = first
    exact = reference.layer_norm_forward(x, precision=torch.float64).y
    # Within what rounding the largest value alone does to the mean.
    atol = float(exact.abs().max()) * torch.finfo(torch.float32).eps / 4
    torch.testing.assert_close(layer_norm_forward(x).y, exact.float(), rtol=1e-6, atol=max(1e-6, atol))


@pytest.mark.parametrize("cols", COLS)
def test_rows_without_spread_give_the_bias(cols, device):
    x = torch.full((2, cols), 1234.5, device=device)
    bias = torch.randn(cols, device=device)
    result = layer_norm_forward(x, torch.ones_like(bias), bias, stats=True)
    torch.testing.assert_close(result.y, bias.expand(2, cols), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.rstd, torch.full((2,), 1e-5**-0.5, device=device))


@pytest.mark.parametrize("cols", [*COLS, 2048, 16384])
def test_no_spread_of_large_values_is_no_negative_variance(cols, device):
    x = torch.full((2, cols), 1.1e10, device=device)
    assert layer_norm_forward(x, eps=1e-12).y.isfinite().all()


@pytest.mark.parametrize("cols", COLS)
def test_float16_near_its_largest_value(cols, device):
    x = (torch.rand(2, cols, device=device) * 4e3 + 6e4).half()
    check(x)
    exact = reference.rms_norm_forward(x, precision=torch.float64).y
    assert_close_to_oracle(rms_norm_forward(x).y, exact.double(), exact)


@pytest.mark.parametrize("cols", [16, 40])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_tiles_rows_past_the_last_one_add_nothing_without_an_eps(cols, device):
    x, dy, residual = torch.randn(3, 3, cols, device=device)
    weight, scale, gate = torch.randn(3, cols, device=device)
    call = {"eps": 0.0, "residual": residual, "scale": scale, "gate": gate}
    actual = layer_norm_backward(dy, x, weight, weight, **call)
    exact = reference.layer_norm_backward(dy, x, weight, weight, **call)
    for name in ("dweight", "dbias", "dgate", "dscale"):
        torch.testing.assert_close(getattr(actual, name), getattr(exact, name), rtol=1e-4, atol=1e-4)


def test_one_element_rows_are_their_bias(device):
    x, bias = torch.randn(5, 1, device=device), torch.randn(1, device=device)
    assert torch.equal(layer_norm_forward(x, bias, bias).y, bias.expand(5, 1))
