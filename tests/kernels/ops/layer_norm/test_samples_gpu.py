"""A scale, shift and gate for each sample at the sizes of diffusion transformers, on a GPU."""

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.kernels.ops.layer_norm.test_samples import LONG, NAMES, check, of_samples

pytestmark = pytest.mark.gpu

SHAPES = ((16, 1024, 1152), (2, 4096, 3072), (8, 256, 1152), (4, 1024, 1536), (3, 333, 640), (2, 77, 2048))
SMALL = ((300, 3, 1152), (3, 70, 40), (5, 7, 1001), (1, 64, 12288), (2, 16, 14336), (2, 5, 100000))


def block(x, residual, six):
    """A part of a DiT in torch."""
    shift, scale, gate = (each[:, None].to(x.dtype) for each in six.chunk(6, -1)[:3])
    h = residual + gate * x
    return F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift, h


def ours(x, residual, six):
    shift, scale, gate = six.chunk(6, -1)[:3]
    return fusednorm.add_layer_norm(x, residual, scale=scale, shift=shift, gate=gate)


def outcome(call, tensors, outside):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    results = tuple(call(*leaves))
    gradients = torch.autograd.grad(results, leaves, outside)
    return [result.detach() for result in (*results, *gradients)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_as_near_as_torchs_and_the_same_each_time(shape, dtype, device):
    x, residual, *outside = torch.randn(4, *shape, device=device, dtype=dtype)
    six = torch.randn(shape[0], 6 * shape[-1], device=device, dtype=dtype)
    tensors = x, residual, six
    found, again, theirs = (outcome(call, tensors, outside) for call in (ours, ours, block))
    exact = outcome(block, [each.double() for each in tensors], [each.double() for each in outside])
    for name, *results in zip(("y", "h", "dx", "dresidual", "six"), found, again, theirs, exact, strict=True):
        result, repeated, of_torch, right = results
        assert torch.equal(result, repeated), name
        noise = 2**-21 * float(right.abs().max())
        assert_close_to_oracle(result, right, of_torch, name, noise)


@pytest.mark.parametrize("names", [NAMES, NAMES[:2], NAMES[2:]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_other_shapes_match_the_oracle(op, shape, dtype, names, device, poisoned):
    x = torch.randn(shape, device=device, dtype=dtype)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-5}
    check(op, x, of_samples(x, 1, names, padded=True, dtype=dtype), activation="silu", **tolerance)


@pytest.mark.parametrize("cols", [1152, 2050, LONG])
def test_a_row_for_each_token(cols, device):
    x = torch.randn(3, 50, cols, device=device)
    check("layer_norm", x, of_samples(x, 2))


def test_replays_follow_new_tensors(device):
    for _ in range(4):
        x, residual = torch.randn(2, 4, 33, 1152, device=device)
        six = torch.randn(4, 6 * 1152, device=device)
        for result, right in zip(ours(x, residual, six), block(x, residual, six), strict=True):
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)
