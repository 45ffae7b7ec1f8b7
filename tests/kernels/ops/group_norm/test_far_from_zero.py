"""Statistics and y of groups whose mean is many standard deviations from zero, against float64 alone.

Errors of the variance are counted in units of 2^-24 of it, as in docs/numerics.md.
"""

from itertools import product

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm.launch.execution import run_launches
from fusednorm.ops.group_norm import backward_choice, forward_choice
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumnSplit
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.contiguous.backward.tile import GroupNormBackwardTile
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.contiguous.forward.split import GroupNormForwardSplit
from fusednorm.ops.group_norm.contiguous.forward.sweep import GroupNormForwardSweep
from fusednorm.ops.group_norm.contiguous.forward.tile import GroupNormForwardTile
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.tensors.arrays import describe_as_array

from tests.kernels.ops.group_norm.cases import channels_last
from tests.kernels.ops.group_norm.far_from_zero import (
    UNIT,
    check_forward,
    check_variance,
    exact_statistics,
    far_from_zero,
)
from tests.sampling import mark_rest_slow

MOST_UNITS = 12
"""What rstd's own rounding, its square root and the sums may take; the old merges took up to 50,000."""

# Groups of 8, 10 and 16 channels: of whole vectors, and of vectors that two groups share.
SHAPES = (((1, 40, 8, 8), 4), ((1, 16, 20, 20), 2), ((2, 48, 5, 7), 3))
MEANS = (1e3, 1e6)
"""In standard deviations."""

# A CPU counts as two multiprocessors, which must hold all programs of a group.
TOGETHER = 4 if torch.cuda.is_available() else 512

CONTIGUOUS = {
    "tile": GroupNormForwardTile(2, 1024, 4),
    "resident": GroupNormForwardResident(2, 1),
    "cooperative": GroupNormForwardCooperative(1, 1, programs_per_sm=TOGETHER, lag=1, ahead=1),
    "split": GroupNormForwardSplit(32, 64, 64, 4),
    "sweep": GroupNormForwardSweep(16, 4),
}
CHANNELS_LAST = {
    "resident": ForwardResidentBlock(4, 4, 1),
    "cooperative": ForwardCooperativeBlock(2, 2, 2, programs_per_sm=TOGETHER, lag=0, ahead=1),
    "cooperative, one behind": ForwardCooperativeBlock(2, 2, 2, programs_per_sm=TOGETHER, lag=1, ahead=1),
    "stream": ForwardSampleStream(1, 4, 3, 3),
    "columns": ForwardColumnSplit(8, 4, 2, 16, 8, 24, 4),
}
CONFIGS = {
    **{f"contiguous {name}": (config, False) for name, config in CONTIGUOUS.items()},
    **{f"channels-last {name}": (config, True) for name, config in CHANNELS_LAST.items()},
}


@pytest.fixture
def use(monkeypatch):
    """Makes a configuration compute forward passes."""

    def choose(config):
        monkeypatch.setattr(forward_choice, "list_candidates", lambda *_: (config,))

    return choose


@pytest.mark.parametrize(("algorithm", "of"), mark_rest_slow(product(CONFIGS, SHAPES), together=1))
def test_statistics_and_y_do_not_depend_on_the_distance_from_zero(algorithm, of, use, device):
    (config, last), (shape, groups) = CONFIGS[algorithm], of
    use(config)
    for mean in MEANS:
        check_forward(shape, groups, mean, last, device, MOST_UNITS)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_statistics_for_a_backward_pass_do_not_depend_on_the_distance_from_zero(shape, groups, last, device):
    for mean in MEANS:
        x = far_from_zero(shape, mean, device)
        exact_mean, variance = exact_statistics(x, groups)
        given = channels_last(x) if last else x
        sample = SampleShape(groups, shape[1] // groups, shape[2] * shape[3], last)
        results = torch.empty(2, shape[0], groups, device=device).unbind()
        tensors = {"x": given, "mean": results[0], "rstd": results[1]}
        array, *statistics = (describe_as_array(name, tensor) for name, tensor in tensors.items())
        run_launches(x.device, backward_choice.plan_statistics(array, sample, 1e-9, None, *statistics), tensors)
        check_variance(results[1], variance, 1e-9, MOST_UNITS)
        torch.testing.assert_close(results[0].double(), exact_mean, rtol=1.01 * UNIT, atol=4 * UNIT)


@pytest.mark.parametrize("mean", MEANS)
def test_a_tile_that_has_no_statistics_centres_x_exactly(mean, monkeypatch, device):
    monkeypatch.setattr(backward_choice, "choose_backward", lambda *_, **__: GroupNormBackwardTile(2, 4, 64, 4))
    x, dy = far_from_zero((2, 8, 7, 7), mean, device), torch.randn(2, 8, 7, 7, device=device)
    weight = torch.randn(8, device=device)
    actual = ours.group_norm_backward(dy, x, 2, weight)
    leaf, leaf_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    torch.nn.functional.group_norm(leaf, 2, leaf_weight, eps=1e-5).backward(dy.double())
    torch.testing.assert_close(actual.dx.double(), leaf.grad, rtol=0, atol=1e-6 * float(leaf.grad.abs().max()))
    scale = float(leaf_weight.grad.abs().max())
    torch.testing.assert_close(actual.dweight.double(), leaf_weight.grad, rtol=0, atol=1e-6 * scale)
