"""Adaptive LayerNorm and RMSNorm: the differentiable functions with a scale and a shift for each sample."""

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError

OPS = ("layer_norm", "rms_norm")


def plain(op, x, weight, scale, shift):
    cols = x.shape[-1:]
    z = F.layer_norm(x, cols, weight, None) if op == "layer_norm" else F.rms_norm(x, cols, weight, 1e-6)
    return z * (1 + scale[:, None]) + shift[:, None]


def tensors(dtype=torch.float32, **kind):
    made = [torch.randn(shape, dtype=dtype, **kind) for shape in ((2, 3, 8), (8,), (2, 48))]
    return [each.requires_grad_() for each in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_norm_before_an_affine_step(op, dtype):
    x, weight, wide = tensors(dtype)
    shift, scale = wide.chunk(6, -1)[:2]
    y = getattr(fusednorm, op)(x, weight, scale=scale, shift=shift)
    dy = torch.randn_like(y)
    exact = [each.detach().double().requires_grad_() for each in (x, weight, wide)]
    shift, scale = exact[2].chunk(6, -1)[:2]
    right = plain(op, exact[0], exact[1], scale, shift)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), right, **tolerance)
    found = torch.autograd.grad(y, (x, weight, wide), dy)
    for gradient, exact_gradient in zip(found, torch.autograd.grad(right, exact, dy.double()), strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, **tolerance)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    x, weight, wide = tensors(torch.float64)

    def call(x, weight, wide):
        shift, scale = wide.chunk(6, -1)[:2]
        return getattr(fusednorm, op)(x, weight, scale=scale, shift=shift)

    assert torch.autograd.gradgradcheck(call, (x, weight, wide))


@pytest.mark.parametrize("op", OPS)
def test_after_an_addition(op):
    x, weight, wide = tensors()
    shift, scale = wide.chunk(6, -1)[:2]
    residual = torch.randn_like(x)
    y, total = getattr(fusednorm, f"add_{op}")(x, residual, weight, scale=scale, shift=shift)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, plain(op, x + residual, weight, scale, shift))


@pytest.mark.parametrize("op", OPS)
def test_torch_compile_has_no_graph_break(op):
    def block(x, weight, wide):
        shift, scale, gate = wide.chunk(6, -1)[:3]
        return x + gate[:, None] * getattr(fusednorm, op)(x, weight, scale=scale, shift=shift)

    given = tensors()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(given[0])
    results = [torch.autograd.grad(run(*given), given, dy) for run in (block, compiled)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("op", OPS)
def test_operators_are_consistent(op):
    x, weight, wide = tensors()
    shift, scale = (each.detach().clone().requires_grad_() for each in wide.chunk(6, -1)[:2])
    options = 0, 1e-5, 0.0, "silu", 0.0, 0
    arguments = (x, weight, None, None, scale, shift, *options)
    torch.library.opcheck(getattr(torch.ops.fusednorm, op).default, arguments)


@pytest.mark.parametrize("op", OPS)
def test_a_shape_that_is_not_of_leading_axes(op):
    with pytest.raises(KernelInputError, match="leading axes"):
        getattr(fusednorm, op)(torch.randn(2, 3, 8), scale=torch.randn(3, 8))


def test_empty_rows():
    x, scale = torch.randn(2, 3, 0, requires_grad=True), torch.randn(2, 0, requires_grad=True)
    y = fusednorm.layer_norm(x, scale=scale)
    y.sum().backward()
    assert scale.grad.shape == scale.shape
