"""GroupNorm at real sizes on a GPU: accuracy beside torch's, determinism, and tensors past 2^31 elements."""

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm import reference

from tests.kernels.ops.group_norm.cases import (
    channels_last,
    check_backward,
    check_forward,
    in_the_other_format,
    make_case,
)

pytestmark = pytest.mark.gpu

REAL = [
    ((2, 320, 64, 64), 32),
    ((2, 640, 32, 32), 32),
    ((2, 1280, 16, 16), 32),
    ((2, 960, 128, 128), 32),
    ((8, 512, 64, 64), 32),
    ((32, 256, 56, 56), 32),
    ((1, 512, 128, 128), 32),
    ((1, 128, 5, 256, 256), 32),
    ((16, 64, 127, 113), 64),
    ((2, 96, 331), 32),
    ((1, 256, 64, 64), 1),
    ((4096, 1280), 32),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), REAL)
def test_real_shapes_match_the_oracle(shape, groups, last, dtype, device, poisoned):
    case = make_case(shape, groups, dtype, device, last and len(shape) > 2, activation="silu")
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), REAL[:7])
def test_every_run_gives_the_same_bits(shape, groups, last, device):
    case = make_case(shape, groups, torch.bfloat16, device, last, activation="silu")
    dy = torch.randn_like(case.x)
    forward, backward = case.forward(ours, stats=True), case.backward(ours, dy)
    for _ in range(3):
        for first, again in zip(forward, case.forward(ours, stats=True), strict=True):
            assert first is again is None or torch.equal(first, again)
        for first, again in zip(backward, case.backward(ours, dy), strict=True):
            assert first is again is None or torch.equal(first, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 320, 64, 64), 32), ((3, 96, 61, 67), 32), ((1, 64, 500, 500), 2)]
)
def test_companions_of_the_other_format_give_the_same_bits(shape, groups, last, dtype, device, poisoned):
    case = make_case(shape, groups, dtype, device, last, residual=True, activation="silu")
    dy = torch.randn_like(case.x)
    wanted = *case.forward(ours), *case.backward(ours, dy, dresidual_out=dy)
    case.residual, dy = map(in_the_other_format, (case.residual, dy))

    def assert_same(results):
        for actual, expected in zip(results, wanted, strict=True):
            assert actual is expected is None or torch.equal(actual, expected)
            assert actual is None or actual.stride() == expected.stride()

    def both():
        return *case.forward(ours), *case.backward(ours, dy, dresidual_out=dy)

    # Planned, and replayed.
    for _ in range(3):
        assert_same(both())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    assert_same(captured)


@pytest.mark.parametrize("last", [False, True])
def test_dropout_on_the_gpu_draws_the_oracles_mask(last, device):
    case = make_case((3, 64, 33, 31), 16, torch.float32, device, last, dropout=0.3, seed=2**50 + 1)
    assert torch.equal(case.forward(ours).y == 0, case.forward(reference).y == 0)


@pytest.mark.parametrize("shape", [(70000, 4), (70000, 8, 3, 3), (3, 1 << 20, 2)])
@pytest.mark.parametrize("last", [False, True])
def test_many_samples_and_many_channels_have_gradients_of_scale_and_shift(shape, last, device, poisoned):
    case = make_case(shape, 2, torch.float32, device, last and len(shape) > 2, activation="silu")
    dy = torch.randn_like(case.x)
    scale, shift = torch.randn(shape[0], 2 * shape[1], device=device).chunk(2, dim=1)
    actual = case.backward(ours, dy, scale=scale, shift=shift)
    exact = case.backward(reference, dy, scale=scale, shift=shift, precision=torch.float64)
    for name in ("dx", "dweight", "dbias", "dscale", "dshift"):
        wanted = getattr(exact, name)
        atol = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(getattr(actual, name).double(), wanted.double(), rtol=1e-5, atol=atol)


def test_programs_that_share_groups_never_wait_in_vain(device):
    # Some sums of many calls are read late; once in 5,000 calls, they had been replaced by then.
    case = make_case((64, 256, 16, 16), 32, torch.float32, device, True, activation="silu")
    dy, statistics = torch.randn_like(case.x), case.forward(ours, stats=True)
    for _ in range(40_000):
        case.backward(ours, dy, mean=statistics.mean, rstd=statistics.rstd)
    torch.cuda.synchronize()


@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("last", [False, True])
def test_more_elements_than_an_int32_counts(groups, last, device):
    # Every channel has moments of its own, so statistics that miss the tensor's far end are wrong; one group
    # of everything needs 64-bit offsets inside the group too.
    x = torch.empty((1, 64, 8192, 4224), dtype=torch.bfloat16, device=device)
    for channel in range(64):
        x[0, channel].normal_(mean=channel % 2, std=1 + channel)
    moments = [(c.double().mean(), c.double().var(correction=0)) for c in x[0]]
    if last:
        x = channels_last(x)
    forward = ours.group_norm_forward(x, groups, stats=True)
    size = 64 // groups
    for group in range(groups):
        means, variances = zip(*moments[group * size : (group + 1) * size], strict=True)
        mean = torch.stack(means).mean()
        variance = (torch.stack(variances) + (torch.stack(means) - mean) ** 2).mean()
        torch.testing.assert_close(forward.mean[0, group].double(), mean, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(forward.rstd[0, group].double(), variance.rsqrt(), rtol=1e-4, atol=0)
        channel = (group + 1) * size - 1
        expected = (x[0, channel].float() - mean.float()) * variance.rsqrt().float()
        torch.testing.assert_close(forward.y[0, channel].float(), expected, rtol=2**-7, atol=2**-7)
    # With dy = x, dx is what rounding leaves.
    gradients = ours.group_norm_backward(x, x, groups, mean=forward.mean, rstd=forward.rstd)
    assert float(gradients.dx.abs().max()) < 1e-2
