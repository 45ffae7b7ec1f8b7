"""Groups that programs share: right, whatever else runs.  They wait for one another, so only a GPU can run them."""

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm import reference
from fusednorm.ops.group_norm import forward_choice as launch
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident

from tests.kernels.harness.on_gpu import on_streams_of_their_own
from tests.kernels.ops.group_norm.cases import check_forward, make_case

pytestmark = pytest.mark.gpu

# Few warps and chunks, so that small groups have many members.
CONTIGUOUS = [
    GroupNormForwardCooperative(2, num_warps=4, programs_per_sm=4, lag=0, ahead=1),
    GroupNormForwardCooperative(2, num_warps=4, programs_per_sm=4, lag=1, ahead=1),
    GroupNormForwardCooperative(4, num_warps=8, programs_per_sm=2, lag=3, ahead=2),
]
CHANNELS_LAST = [
    ForwardCooperativeBlock(2, 2, num_warps=4, programs_per_sm=4, lag=0, ahead=1),
    ForwardCooperativeBlock(2, 3, num_warps=4, programs_per_sm=3, lag=1, ahead=1),
    ForwardCooperativeBlock(2, 2, num_warps=8, programs_per_sm=2, lag=2, ahead=2),
]
COOPERATIVE = [(config, False) for config in CONTIGUOUS] + [(config, True) for config in CHANNELS_LAST]


@pytest.fixture
def use(monkeypatch):
    """Makes the launchers take this configuration."""

    def choose(config):
        monkeypatch.setattr(launch, "list_candidates", lambda *_: (config,))

    return choose


@pytest.mark.parametrize(("config", "last"), COOPERATIVE)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 32, 32, 32), 4),
        ((3, 40, 61, 64), 4),  # groups of ten channels, slabs and pieces that are not full
        ((40, 64, 64, 64), 8),  # more groups than are under way at once
        ((2, 96, 37, 41), 32),  # groups of three that start anywhere in 16 bytes
        ((20, 104, 43, 45), 8),  # many of them
        ((3, 15, 61, 67), 3),  # nor do samples start at multiples of 16 bytes
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cooperative_groups_match_the_oracle(config, last, shape, groups, dtype, use, device, poisoned):
    use(config)
    check_forward(make_case(shape, groups, dtype, device, last, activation="silu"))


@pytest.mark.parametrize(("config", "last"), COOPERATIVE)
def test_residuals_and_dropout_of_cooperative_groups(config, last, use, device, poisoned):
    use(config)
    check_forward(make_case((2, 64, 64, 64), 8, torch.bfloat16, device, last, residual=True))
    case = make_case((2, 64, 64, 64), 8, torch.float32, device, last, dropout=0.5, seed=3)
    assert torch.equal(case.forward(ours).y == 0, case.forward(reference).y == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("config", "last"),
    [*COOPERATIVE, (GroupNormForwardResident(8, 2), False), (ForwardResidentBlock(4, 8, 2), True)],
)
def test_scale_and_shift_of_groups_in_registers(config, last, dtype, use, device, poisoned):
    use(config)
    case = make_case((5, 80, 32, 32), 8, dtype, device, last, activation="silu")
    scale, shift = torch.randn(5, 160, device=device).to(dtype).chunk(2, dim=1)
    exact = case.forward(reference, scale=scale, shift=shift, precision=torch.float64).y
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    actual = case.forward(ours, scale=scale, shift=shift).y
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize(("config", "last"), COOPERATIVE)
def test_a_mean_far_from_zero_does_not_cancel_between_members(config, last, use, device):
    use(config)
    case = make_case((2, 32, 64, 64), 4, torch.float32, device, last, affine=False)
    case.x += 1e4
    expected = torch.nn.functional.group_norm(case.x.double(), 4)
    torch.testing.assert_close(case.forward(ours).y.double(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize(("config", "last"), COOPERATIVE)
def test_two_streams_and_a_long_kernel_at_once(config, last, use, device):
    use(config)
    cases = [make_case((16, 128, 64, 64), 16, torch.bfloat16, device, last) for _ in range(2)]
    expected = [case.forward(ours).y for case in cases]
    calls = [lambda case=case: case.forward(ours).y for case in cases]
    for ys in on_streams_of_their_own(calls, device):
        assert all(torch.equal(y, wanted) for y, wanted in zip(ys, expected, strict=True))


@pytest.mark.parametrize(("config", "last"), COOPERATIVE)
def test_a_captured_launch_can_be_replayed(config, last, use, device):
    use(config)
    case = make_case((5, 64, 64, 64), 8, torch.bfloat16, device, last, activation="silu")
    case.forward(ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.forward(ours).y
    for _ in range(3):
        case.x.copy_(torch.randn_like(case.x))
        graph.replay()
        assert torch.equal(y, case.forward(ours).y)


@pytest.mark.parametrize(
    ("config", "last"),
    [(GroupNormForwardResident(8, 2, writers=4), False), (ForwardResidentBlock(4, 8, 2, writers=4), True)],
)
def test_programs_that_share_the_writing_do_not_change_the_bits(config, last, use, device, poisoned):
    use(config)
    case = make_case((16, 320, 16, 16), 32, torch.bfloat16, device, last, activation="silu")
    many = case.forward(ours, stats=True)
    case.x = case.x[:1]
    few = case.forward(ours, stats=True)
    for a, b in zip(many, few, strict=True):
        assert a is b is None or torch.equal(a[:1], b)
