"""Contiguous groups that start and end between multiples of 16 bytes, resident in one program."""

import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm import reference

from tests.kernels.ops.group_norm.cases import check_forward, make_case, use_configuration

SHAPES = [
    ((2, 8, 37), 8),  # less than a chunk, each group starts elsewhere in 16 bytes
    ((1, 8, 605), 8),  # both ends of several chunks
    ((1, 24, 5), 8),  # a vector lies in more than two channels
    ((1, 12, 174), 4),  # vectors in two channels
    ((1, 16, 255), 16),  # with what lies before it a group needs a chunk more
]


@pytest.fixture(autouse=True)
def resident(monkeypatch):
    use_configuration(monkeypatch, "resident")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_match_the_oracle(shape, groups, dtype, device, poisoned):
    check_forward(make_case(shape, groups, dtype, device, activation="silu"))


@pytest.mark.parametrize(("shape", "groups"), SHAPES[:3])
def test_with_a_residual_scale_and_shift(shape, groups, device, poisoned):
    case = make_case(shape, groups, torch.float32, device, residual=True)
    scale, shift = torch.randn(2, *shape[:2], device=device)
    actual = case.forward(ours, scale=scale, shift=shift)
    exact = case.forward(reference, scale=scale, shift=shift, precision=torch.float64)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.residual_out, case.x + case.residual, rtol=0, atol=0)


def test_dropout_draws_the_oracles_mask(device, poisoned):
    case = make_case((2, 8, 37), 8, torch.float32, device, dropout=0.4, seed=7)
    actual, exact = case.forward(ours), case.forward(reference, precision=torch.float64)
    assert torch.equal(actual.y == 0, exact.y == 0)
    torch.testing.assert_close(actual.y, exact.y.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_neighbour_in_the_same_16_bytes_does_not_matter(value, device, poisoned):
    case = make_case((1, 8, 37), 8, torch.float32, device)
    before = case.forward(ours, stats=True)
    case.x[:, 3] = value
    after = case.forward(ours, stats=True)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(before.y[:, others], after.y[:, others])
    assert torch.equal(before.rstd[:, others], after.rstd[:, others])


@pytest.mark.parametrize(("shape", "groups"), [SHAPES[0], SHAPES[3]])
def test_a_sample_has_the_same_bits_in_any_company(shape, groups, device, poisoned):
    case = make_case((3, *shape[1:]), groups, torch.bfloat16, device)
    together = case.forward(ours).y
    case.x = case.x[1:2].clone()
    assert torch.equal(together[1:2], case.forward(ours).y)
