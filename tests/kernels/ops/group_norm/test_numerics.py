"""Groups on which a careless variance fails: large means, no spread, the edge of float16, outliers."""

import fusednorm.api.group_norm as ours
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import reference

from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.kernels.ops.group_norm.cases import (
    CHANNELS_LAST,
    CONTIGUOUS,
    channels_last,
    use_configuration,
)

ALGORITHMS = (*CONTIGUOUS, *CHANNELS_LAST)
SHAPE, GROUPS = (1, 6, 10, 11), 2


@pytest.fixture(params=ALGORITHMS)
def lay(request, monkeypatch):
    """Puts a tensor into the layout of the algorithm under test, which is then the one that runs."""
    return channels_last if use_configuration(monkeypatch, request.param) else lambda x: x


def check(x):
    exact = reference.group_norm_forward(x, GROUPS, precision=torch.float64).y
    assert_close_to_oracle(ours.group_norm_forward(x, GROUPS).y, exact.double(), F.group_norm(x, GROUPS))


def test_large_mean_does_not_cancel(lay, device):
    check(lay(torch.randn(SHAPE, device=device) + 1e6))


def test_large_mean_does_not_cancel_in_backward(lay, device):
    x, dy = lay(torch.randn(SHAPE, device=device) + 1e6), lay(torch.randn(SHAPE, device=device))
    weight = torch.randn(SHAPE[1], device=device)
    actual = ours.group_norm_backward(dy, x, GROUPS, weight)
    exact = reference.group_norm_backward(dy, x, GROUPS, weight, precision=torch.float64)
    leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    F.group_norm(leaf, GROUPS, weight_leaf).backward(dy)
    assert_close_to_oracle(actual.dx, exact.dx.double(), leaf.grad, "dx")
    assert_close_to_oracle(actual.dweight, exact.dweight.double(), weight_leaf.grad, "dweight")


@pytest.mark.parametrize("first", [0.0, -1e6])
def test_first_values_far_from_the_rest_do_not_cancel(first, lay, device):
    # The worst place for an outlier: it is its lane's pivot.  The number of tiles bounds what that costs.
    x = torch.randn(SHAPE, device=device) + 1e3
    x[:, :, 0, 0] = first
    exact = reference.group_norm_forward(x, GROUPS, precision=torch.float64, stats=True)
    actual = ours.group_norm_forward(lay(x), GROUPS, stats=True)
    torch.testing.assert_close(actual.rstd, exact.rstd.float(), rtol=1e-5, atol=0)


def test_channels_of_different_size_do_not_cancel(lay, device):
    scale = torch.tensor([1e-3, 1.0, 1e3, 1e6, 10.0, 0.1], device=device).view(1, 6, 1, 1)
    check(lay((torch.randn(SHAPE, device=device) + 3) * scale))


def test_groups_without_spread_give_the_bias(lay, device):
    x = lay(torch.full(SHAPE, 1234.5, device=device))
    bias = torch.randn(SHAPE[1], device=device)
    result = ours.group_norm_forward(x, GROUPS, torch.ones_like(bias), bias, stats=True)
    expected = bias.view(1, -1, 1, 1).expand(SHAPE)
    torch.testing.assert_close(result.y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.rstd, torch.full((1, GROUPS), 1e-5**-0.5, device=device))


def test_large_values_without_spread_have_gradients(lay, device):
    x, dy = lay(torch.full(SHAPE, 1e13, device=device)), lay(torch.randn(SHAPE, device=device))
    actual = ours.group_norm_backward(dy, x, GROUPS, activation="gelu_tanh")
    exact = reference.group_norm_backward(dy, x, GROUPS, activation="gelu_tanh", precision=torch.float64)
    torch.testing.assert_close(actual.dx, exact.dx, rtol=1e-5, atol=1e-3)


def test_float16_near_its_largest_value(lay, device):
    check(lay((torch.rand(SHAPE, device=device) * 4e3 + 6e4).half()))


def test_a_nan_stays_in_its_group(lay, device):
    x = torch.randn(SHAPE, device=device)
    x[0, 1, 3, 3] = float("nan")
    y = ours.group_norm_forward(lay(x), GROUPS).y
    assert torch.isnan(y[:, :3]).all()
    assert torch.isfinite(y[:, 3:]).all()
