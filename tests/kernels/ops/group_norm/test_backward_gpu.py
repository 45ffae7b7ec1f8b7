"""GroupNorm's backward programs that wait for one another: right, whatever else runs.  Only a GPU can run them."""

from functools import partial

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm.ops.group_norm import backward_choice as launch
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.sample_shape import SampleShape

from tests.kernels.harness.on_gpu import on_streams_of_their_own
from tests.kernels.ops.group_norm.cases import check_backward, make_case

pytestmark = pytest.mark.gpu

# Whole and partial channels, parts of several pieces, and parts that no channel fills.
COOPERATIVE = [
    ((5, 64, 64, 64), 16, GroupNormBackwardCooperative(1, 2, 1, 4, 4, 2, 1)),
    ((5, 64, 64, 64), 16, GroupNormBackwardCooperative(2, 4, 1, 4, 3, 3, 2)),
    ((3, 80, 40, 40), 8, GroupNormBackwardCooperative(4, 2, 1, 4, 4, 1, 1)),
    ((300, 64, 16, 16), 2, GroupNormBackwardCooperative(8, 1, 1, 4, 4, 2, 2)),
    ((3, 30, 100, 100), 3, GroupNormBackwardCooperative(1, 2, 4, 4, 4, 2, 1)),
    ((2, 8, 300, 300), 1, GroupNormBackwardCooperative(1, 2, 5, 8, 2, 3, 2)),
]
# Groups that fill a vector, a block or neither, and blocks that do not divide the channels.
BLOCKS = [
    ((5, 64, 32, 32), 16, BackwardCooperativeBlock(64, 2, 1, 4, 4, 2, 1)),
    ((3, 512, 32, 32), 32, BackwardCooperativeBlock(64, 4, 1, 4, 3, 2, 0)),
    ((7, 320, 32, 32), 32, BackwardCooperativeBlock(64, 2, 2, 4, 4, 2, 1)),
    ((2, 960, 40, 40), 32, BackwardCooperativeBlock(120, 2, 4, 4, 3, 1, 1)),
    (
        (16, 320, 64, 64),
        32,
        BackwardCooperativeBlock(64, 2, 4, 4, 3, 1, 1),
    ),  # many turns, vectors and blocks across groups
    ((40, 320, 17, 19), 32, BackwardCooperativeBlock(120, 2, 1, 4, 3, 3, 2)),
    ((3, 128, 50, 50), 32, BackwardCooperativeBlock(32, 4, 2, 8, 2, 2, 1)),
    ((2, 256, 30, 30), 1, BackwardCooperativeBlock(128, 2, 4, 4, 4, 2, 1)),
    ((2, 64, 30, 30), 64, BackwardCooperativeBlock(64, 2, 1, 4, 3, 2, 1)),
    ((70, 1280, 16, 16), 32, BackwardCooperativeBlock(40, 4, 1, 4, 2, 1, 1)),  # a block is a group; many turns
    ((33, 512, 31, 33), 32, BackwardCooperativeBlock(16, 2, 2, 8, 2, 2, 1)),
]
CONFIGS = [*((*case, False) for case in COOPERATIVE), *((*case, True) for case in BLOCKS)]


@pytest.fixture
def share(monkeypatch):
    """Makes the launcher take one configuration."""
    return lambda config: monkeypatch.setattr(launch, "choose_backward", lambda *_, **__: config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "groups", "config", "last"), CONFIGS)
def test_cooperative_groups_match_the_oracle(shape, groups, config, last, dtype, share, device, poisoned):
    share(config)
    check_backward(make_case(shape, groups, dtype, device, last, activation="silu"), saved=True)
    check_backward(make_case(shape, groups, dtype, device, last, affine=False, residual=True), saved=False)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("shape", "groups", "config", "last"), [CONFIGS[0], CONFIGS[8]])
def test_cooperative_groups_take_any_activation(shape, groups, config, last, activation, share, device, poisoned):
    share(config)
    for dtype in (torch.float16, torch.float32):
        check_backward(make_case(shape, groups, dtype, device, last, activation=activation), saved=True)


@pytest.mark.parametrize(("shape", "groups", "config", "last"), CONFIGS)
def test_the_forms_that_wait_and_the_one_that_does_not_agree(shape, groups, config, last, share, device):
    case = make_case(shape, groups, torch.float32, device, last, activation="silu", dropout=0.2, seed=3)
    dy, outside = torch.randn_like(case.x), torch.randn_like(case.x)
    scale, shift = torch.randn(shape[0], 2 * shape[1], device=device).chunk(2, dim=1)
    given = {"dresidual_out": outside, "scale": scale, "shift": shift}
    share(config)
    shared = case.backward(ours, dy, **given)
    share(launch.find_split_backward(SampleShape(groups, shape[1] // groups, case.x[0, 0].numel(), last), 4))
    for actual, wanted in zip(shared, case.backward(ours, dy, **given), strict=True):
        assert (actual is None) == (wanted is None)
        if actual is not None:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "groups", "config", "last"), [CONFIGS[0], CONFIGS[4], CONFIGS[7], CONFIGS[8]])
def test_a_sample_does_not_depend_on_the_others(shape, groups, config, last, share, device):
    share(config)
    case = make_case(shape, groups, torch.bfloat16, device, last, activation="silu")
    dy = torch.randn_like(case.x)
    whole = case.backward(ours, dy).dx
    case.x = case.x[-1:]
    assert torch.equal(case.backward(ours, dy[-1:]).dx, whole[-1:])


@pytest.mark.parametrize(("shape", "groups", "config", "last"), [CONFIGS[0], CONFIGS[8]])
def test_two_streams_and_a_long_kernel_at_once(shape, groups, config, last, share, device):
    share(config)
    cases = [make_case((40, *shape[1:]), groups, torch.float16, device, last) for _ in range(2)]
    dys = [torch.randn_like(case.x) for case in cases]
    expected = [case.backward(ours, dy) for case, dy in zip(cases, dys, strict=True)]
    calls = [partial(case.backward, ours, dy) for case, dy in zip(cases, dys, strict=True)]
    for results in on_streams_of_their_own(calls, device):
        for result, right in zip(results, expected, strict=True):
            for actual, wanted in zip(result[:3], right[:3], strict=True):
                assert torch.equal(actual, wanted)


@pytest.mark.parametrize(("shape", "groups", "config", "last"), [CONFIGS[0], CONFIGS[8]])
def test_a_captured_launch_can_be_replayed(shape, groups, config, last, share, device):
    share(config)
    case = make_case(shape, groups, torch.float16, device, last)
    statistics = case.forward(ours, stats=True)
    given = {"mean": statistics.mean, "rstd": statistics.rstd}
    dy = torch.randn_like(case.x)
    case.backward(ours, dy, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.backward(ours, dy, **given)
    for _ in range(3):
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        for actual, wanted in zip(captured[:3], case.backward(ours, dy, **given)[:3], strict=True):
            assert torch.equal(actual, wanted)
