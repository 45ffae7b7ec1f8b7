"""Groups that programs share in the forward pass."""

import pytest
import torch
from fusednorm.ops.group_norm import forward_choice
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative

from tests.kernels.harness.cells import sampled
from tests.kernels.ops.group_norm.cases import check_forward, make_case

# A launch waits between pieces, whatever their elements are.
DTYPES_AND_LAGS = sampled(
    [(dtype, lag) for dtype in (torch.float32, torch.bfloat16) for lag in (0, 1, 2)],
    [(torch.float32, 0), (torch.bfloat16, 1), (torch.float32, 2)],
)


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers take a configuration that shares."""
    made = forward_choice.plan_forward

    def choose(config):
        monkeypatch.setattr("fusednorm.api.group_norm.plan_forward", lambda call: made(call, config))

    return choose


@pytest.mark.parametrize(("dtype", "lag"), DTYPES_AND_LAGS)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 4, 16, 64), 2),  # four slabs of a group, pieces in one channel
        ((1, 6, 5, 56), 2),  # the second slab is not full, vectors in one channel
        ((1, 2, 419), 1),  # no vector access
        ((1, 6, 419), 2),  # nor here: groups of three channels in three slabs, each vector with its parameters
        ((1, 12, 174), 4),  # groups that start and end between multiples of 16 bytes
    ],
)
def test_slabs_of_contiguous_groups_match_the_oracle(shape, groups, lag, dtype, share, device, poisoned):
    share(GroupNormForwardCooperative(2, num_warps=1, programs_per_sm=2, lag=lag, ahead=1))
    check_forward(make_case(shape, groups, dtype, device, activation="silu"))


@pytest.mark.parametrize(("dtype", "lag"), DTYPES_AND_LAGS)
@pytest.mark.parametrize(
    ("shape", "groups", "block_groups"),
    [
        ((1, 16, 8, 16), 4, 2),  # full pieces and blocks, groups of four
        ((1, 48, 9, 11), 16, 8),  # groups of three; the last piece is not full
        ((1, 80, 70), 2, 1),  # groups of whole vectors that waste lanes
        ((1, 40, 40), 5, 2),  # the last block is not full
    ],
)
def test_pieces_of_blocks_match_the_oracle(shape, groups, block_groups, lag, dtype, share, device, poisoned):
    share(ForwardCooperativeBlock(block_groups, 2, num_warps=1, programs_per_sm=4, lag=lag, ahead=1))
    check_forward(make_case(shape, groups, dtype, device, last=True))


def test_a_residual_and_an_activation_of_cooperative_groups(share, device):
    for last, config in (
        (False, GroupNormForwardCooperative(1, 1, 1, 0, 1)),
        (True, ForwardCooperativeBlock(2, 1, 1, 1, 0, 1)),
    ):
        share(config)
        check_forward(make_case((1, 4, 8, 12), 2, torch.float32, device, last, residual=True))
        options = {"activation": "leaky_relu", "negative_slope": -0.75}
        check_forward(make_case((1, 4, 8, 12), 2, torch.float32, device, last, **options))
