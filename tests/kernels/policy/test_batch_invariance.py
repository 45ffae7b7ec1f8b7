"""`require_batch_invariance`: whether a sample's bits depend on how many come with it."""

import fusednorm
import pytest
import torch
from fusednorm.policy import batch_invariance

GROUPS = 4
# One part of a sample, where samples are many.
SHAPE = (16, 33, 32)


@pytest.fixture
def require(monkeypatch):
    """The switch, as at first, and put back afterwards."""
    monkeypatch.setattr(batch_invariance, "_required", False)
    return fusednorm.require_batch_invariance


def samples(count: int, device: torch.device) -> torch.Tensor:
    x = torch.randn(count, *SHAPE, device=device) + 3
    return x.contiguous(memory_format=torch.channels_last)


def both_passes(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    forward = fusednorm.group_norm_forward(x, GROUPS, activation="silu", stats=True)
    backward = fusednorm.group_norm_backward(dy, x, GROUPS, mean=forward.mean, rstd=forward.rstd, activation="silu")
    return forward.y, forward.mean, forward.rstd, backward.dx


def alone_and_together(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each result of one sample by itself, and as the first of many."""
    torch.manual_seed(23)
    count = 300 if device.type == "cuda" else 5
    x, dy = samples(count, device), samples(count, device)
    together = [result[:1] for result in both_passes(x, dy)]
    return list(zip(both_passes(x[:1], dy[:1]), together, strict=True))


def test_once_required_a_sample_has_the_same_bits_in_any_company(require, device):
    require(True)
    assert all(torch.equal(alone, together) for alone, together in alone_and_together(device))


def test_at_first_few_samples_round_otherwise_and_no_more_than_that(require, device):
    pairs = alone_and_together(device)
    assert not all(torch.equal(alone, together) for alone, together in pairs)
    for alone, together in pairs:
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
