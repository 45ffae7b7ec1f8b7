"""Groups that programs share in the forward pass."""

from itertools import product

import pytest
import torch
from fusednorm.ops.group_norm import forward_choice
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative

from tests.kernels.ops.group_norm.cases import check_forward, make_case
from tests.sampling import mark_rest_slow

# A launch waits between pieces, whatever their elements are.
DTYPES_AND_LAGS = (torch.float32, 0), (torch.bfloat16, 1), (torch.float32, 2)


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers take a configuration that shares."""
    made = forward_choice.plan_forward

    def choose(config):
        monkeypatch.setattr("fusednorm.api.group_norm.plan_forward", lambda call: made(call, config))

    return choose


SLABS = (
    ((1, 4, 16, 64), 2),  # four slabs of a group, pieces in one channel
    ((1, 6, 5, 56), 2),  # the second slab is not full, vectors in one channel
    ((1, 2, 419), 1),  # no vector access
    ((1, 6, 419), 2),  # nor here: groups of three channels in three slabs, each vector with its parameters
    ((1, 12, 174), 4),  # groups that start and end between multiples of 16 bytes
)


@pytest.mark.parametrize(("of", "elements"), mark_rest_slow(product(SLABS, DTYPES_AND_LAGS), together=1))
def test_slabs_of_contiguous_groups_match_the_oracle(of, elements, share, device, poisoned):
    (shape, groups), (dtype, lag) = of, elements
    share(GroupNormForwardCooperative(2, num_warps=1, programs_per_sm=2, lag=lag, ahead=1))
    check_forward(make_case(shape, groups, dtype, device, activation="silu"))


BLOCKS = (
    ((1, 16, 8, 16), 4, 2),  # full pieces and blocks, groups of four
    ((1, 48, 9, 11), 16, 8),  # groups of three; the last piece is not full
    ((1, 80, 70), 2, 1),  # groups of whole vectors that waste lanes
    ((1, 40, 40), 5, 2),  # the last block is not full
)


@pytest.mark.parametrize(("of", "elements"), mark_rest_slow(product(BLOCKS, DTYPES_AND_LAGS), together=1))
def test_pieces_of_blocks_match_the_oracle(of, elements, share, device, poisoned):
    (shape, groups, block_groups), (dtype, lag) = of, elements
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
