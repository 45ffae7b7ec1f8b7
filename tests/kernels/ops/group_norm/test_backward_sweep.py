"""Groups and blocks of columns that one program reads twice in the backward pass."""

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm.launch import replay_cache
from fusednorm.ops.group_norm import backward_choice
from fusednorm.ops.group_norm.channels_last.backward.sweep import BackwardBlockSweep
from fusednorm.ops.group_norm.contiguous.backward.sweep import GroupNormBackwardSweep

from tests.kernels.ops.group_norm.cases import check_backward, make_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups", "config"),
    [
        ((1, 8, 8, 8), 2, GroupNormBackwardSweep(2, 1, 1)),  # lanes of a channel that cover it in one tile or two
        (
            (2, 12, 5, 16),
            2,
            GroupNormBackwardSweep(4, 2, 1),
        ),  # last channels, fewer than a program has
        ((2, 6, 5, 7), 2, GroupNormBackwardSweep(2, 1, 1)),  # channels that do not start at multiples of 16 bytes
        ((1, 16, 8, 8), 4, BackwardBlockSweep(4, 1)),  # no idle lane
        ((2, 48, 5, 5), 3, BackwardBlockSweep(1, 1)),  # two idle lanes, and a last tile that is not full
        ((1, 160, 5, 11), 8, BackwardBlockSweep(2, 1)),  # groups of a block, written by several programs
        ((1, 80, 11), 8, BackwardBlockSweep(4, 1)),  # vectors that belong to two groups
        ((1, 120, 11), 3, BackwardBlockSweep(2, 1)),  # a last block of fewer groups
    ],
)
def test_groups_that_are_read_twice_match_the_oracle(shape, groups, config, dtype, device, poisoned, monkeypatch):
    plan = backward_choice.plan_backward
    monkeypatch.setattr("fusednorm.api.group_norm.plan_backward", lambda call: plan(call, config))
    last = isinstance(config, BackwardBlockSweep)
    check_backward(make_case(shape, groups, dtype, device, last, activation="silu"), saved=True)


def test_the_bits_of_a_sample_do_not_depend_on_how_many_programs_write_a_block(device, monkeypatch):
    plan = backward_choice.plan_backward
    config = BackwardBlockSweep(2, 1)
    monkeypatch.setattr("fusednorm.api.group_norm.plan_backward", lambda call: plan(call, config))
    case = make_case((2, 32, 5, 5), 4, torch.bfloat16, device, True)
    dy = torch.randn_like(case.x)
    module = "fusednorm.ops.group_norm.channels_last.backward.sweep"
    results = []
    for writers in (1, 4):
        monkeypatch.setattr(f"{module}.count_writers_per_group", lambda *_, writers=writers: writers)
        results.append(backward_results(case, dy))
    for one, four in zip(*results, strict=True):
        assert torch.equal(one, four)


def backward_results(case, dy):
    """dx, dweight and dbias by kernels planned anew."""
    replay_cache.clear_replays()
    return case.backward(ours, dy)[:3]
