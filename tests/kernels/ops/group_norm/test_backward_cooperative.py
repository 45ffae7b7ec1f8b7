"""Groups that programs share in the backward pass."""

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm import reference
from fusednorm.ops.group_norm import backward_choice
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative

from tests.kernels.ops.group_norm.cases import check_backward, make_case


@pytest.fixture
def share(monkeypatch):
    """Makes the launcher take a configuration that shares."""
    made = backward_choice.plan_backward

    def choose(config):
        monkeypatch.setattr("fusednorm.api.group_norm.plan_backward", lambda call: made(call, config))

    return choose


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups", "config"),
    [
        (
            (1, 4, 16, 24),
            2,
            GroupNormBackwardCooperative(1, 1, 2, 1, 4, 2, 0),
        ),  # parts in one channel, of two pieces
        ((1, 8, 8, 16), 2, GroupNormBackwardCooperative(2, 1, 1, 1, 4, 1, 0)),  # of two channels
        (
            (1, 6, 5, 24),
            2,
            GroupNormBackwardCooperative(2, 2, 1, 1, 6, 1, 0),
        ),  # neither channels nor positions come out even
    ],
)
def test_parts_of_contiguous_groups_match_the_oracle(shape, groups, config, dtype, share, device, poisoned):
    share(config)
    check_backward(make_case(shape, groups, dtype, device, activation="silu"), saved=True)


@pytest.mark.parametrize(
    ("shape", "groups", "config"),
    [
        (
            (1, 16, 8, 8),
            4,
            BackwardCooperativeBlock(16, 1, 2, 1, 4, 2, 0),
        ),  # a block of whole groups, slabs of two pieces
        (
            (1, 48, 5, 5),
            8,
            BackwardCooperativeBlock(16, 2, 1, 1, 8, 1, 0),
        ),  # groups in two blocks, the last slab not full
        ((1, 80, 11), 8, BackwardCooperativeBlock(40, 1, 1, 1, 16, 1, 0)),  # groups of ten that vectors straddle
        ((2, 32, 8, 8), 2, BackwardCooperativeBlock(16, 1, 1, 1, 4, 1, 0)),  # a block of one group, in four slabs
        (
            (1, 80, 11),
            2,
            BackwardCooperativeBlock(40, 1, 1, 1, 16, 2, 0),
        ),  # that leaves lanes idle, the last slab not full
    ],
)
def test_blocks_of_channels_last_groups_match_the_oracle(shape, groups, config, share, device, poisoned):
    share(config)
    check_backward(make_case(shape, groups, torch.bfloat16, device, last=True), saved=True)


@pytest.mark.parametrize(
    "activation", [{"activation": "gelu"}, {"activation": "leaky_relu", "negative_slope": -0.75}]
)
@pytest.mark.parametrize(
    ("last", "config"),
    [
        (False, GroupNormBackwardCooperative(2, 1, 1, 1, 4, 1, 0)),
        (True, BackwardCooperativeBlock(8, 1, 2, 1, 4, 2, 0)),
    ],
)
def test_scale_shift_and_outside_gradients_of_cooperative_groups(last, config, activation, share, device, poisoned):
    share(config)
    case = make_case((1, 8, 8, 8), 2, torch.float32, device, last, residual=True, **activation)
    saved = case.forward(reference, stats=True)
    given = {"mean": saved.mean, "rstd": saved.rstd, "dresidual_out": torch.randn_like(case.x)}
    given |= dict(zip(("scale", "shift"), torch.randn(2, 1, 8, device=device), strict=True))
    dy = torch.randn_like(case.x)
    actual = case.backward(ours, dy, **given)
    exact = case.backward(reference, dy, **given, precision=torch.float64)
    for got, wanted in zip(actual, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
