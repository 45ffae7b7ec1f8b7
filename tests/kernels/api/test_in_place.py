"""Every differentiable result may be changed in place, as models do with `nn.ReLU(inplace=True)` after a norm."""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.api import autograd
from fusednorm.devices.device_properties import HAS_TRITON
from torch import nn

from tests.kernels.api.norm_calls import CALLS, Dispatched, inputs
from tests.kernels.cpu.calls import OPS, call, of_rows, tensors
from tests.sampling import mark_rest_slow

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def gradients(results, leaves, *, in_place):
    """Gradients through a change of each result, in place or not."""
    changed = [r.add_(0.5).relu_() if in_place else (r + 0.5).relu() for r in results]
    found = torch.autograd.grad(sum(t.double().square().sum() for t in changed), leaves, allow_unused=True)
    return [*changed, *found]


def check(compute, leaves):
    """Changes in place give the values and gradients of changes that are not in place."""
    wanted = gradients(compute(), leaves, in_place=False)
    for got, want in zip(gradients(compute(), leaves, in_place=True), wanted, strict=True):
        assert got is want is None or torch.equal(got, want)
    assert not any(result._is_view() for result in compute())


@pytest.mark.parametrize(("op", "dtype"), mark_rest_slow(product(OPS, DTYPES), together=1))
def test_results_of_functions_may_be_changed_in_place(op, dtype):
    x, weight, bias, residual, _ = (None if t is None else t.requires_grad_() for t in tensors(op, dtype))
    scales = [{}] if of_rows(op) else [{}, {"scale": torch.randn(x.shape[:2], requires_grad=True)}]
    choices = [None, residual], ["none", "silu"], [0.0, 0.5], [True, False], scales
    for added, activation, dropout, affine, more in product(*choices):
        parameters = (weight, bias) if affine else (None, None)
        options = {"residual": added, "activation": activation, **more}
        if dropout:
            options |= {"dropout": dropout, "seed": 1}
        leaves = [t for t in (x, added, *parameters) if t is not None]

        def compute(parameters=parameters, options=options):
            return call(op, x, *parameters, **options)

        check(compute, leaves)
        if activation == "silu":
            with Dispatched():
                check(compute, leaves)


@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 4, 1, 1), (1, 4, 1, 3), (2, 4, 2, 1, 3)])
@pytest.mark.parametrize("last", [False, True])
def test_results_of_all_layouts_may_be_changed_in_place(shape, last):
    x, residual = torch.randn(2, *shape)
    if last:
        x, residual = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, residual))
    x.requires_grad_()
    for activation in ("none", "silu"):
        check(lambda a=activation: [fusednorm.group_norm(x, 2, activation=a)], [x])
        check(lambda a=activation: fusednorm.add_group_norm(x, residual, 2, activation=a), [x])


@pytest.mark.parametrize("name", CALLS)
def test_results_of_kernels_may_be_changed_in_place(name, device, monkeypatch):
    if not HAS_TRITON:
        pytest.skip("there are no kernels without Triton")
    passes = autograd.group_norm_passes if "group" in name else autograd.layer_norm_passes
    monkeypatch.setattr(autograd, "select_library", lambda *_: passes)
    leaves = inputs(name, device, torch.float32)

    def compute():
        result = CALLS[name](*leaves)
        return (result,) if isinstance(result, torch.Tensor) else result

    check(compute, leaves)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_differentiated_may_be_changed_in_place(name, dtype):
    leaves = inputs(name, dtype=dtype)

    def compute():
        result = CALLS[name](*leaves)
        results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        found = torch.autograd.grad(
            sum(r.square().sum() for r in results), leaves, create_graph=True, allow_unused=True
        )
        # The gradients of x and of the residual may be one tensor.
        return list({id(g): g for g in found if g is not None}.values())

    wanted = gradients(compute(), leaves, in_place=False)
    for got, want in zip(gradients(compute(), leaves, in_place=True), wanted, strict=True):
        assert got is want is None or torch.equal(got, want)


MODULES = {
    "layer_norm": (lambda **o: fusednorm.LayerNorm(6, **o), (5, 6)),
    "layer_norm of two axes": (lambda **o: fusednorm.LayerNorm((4, 6), **o), (5, 4, 6)),
    "layer_norm without parameters": (lambda **o: fusednorm.LayerNorm(6, elementwise_affine=False, **o), (5, 6)),
    "rms_norm": (lambda **o: fusednorm.RMSNorm(6, **o), (5, 6)),
    "rms_norm of two axes": (lambda **o: fusednorm.RMSNorm((4, 6), **o), (5, 4, 6)),
    "group_norm": (lambda **o: fusednorm.GroupNorm(2, 4, **o), (3, 4, 5, 5)),
    "group_norm of one": (lambda **o: fusednorm.GroupNorm(2, 4, **o), (1, 4, 1, 1)),
}


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("name", MODULES)
def test_results_of_modules_may_be_changed_in_place(name, activation, device):
    make, shape = MODULES[name]
    module = make(activation=activation, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    leaves = [x, *module.parameters()]
    wanted = gradients([module(x)], leaves, in_place=False)
    for got, want in zip(gradients([module(x)], leaves, in_place=True), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_patched_model_with_activations_in_place_is_trained(channels_last, device):
    def model():
        torch.manual_seed(0)
        groups = [nn.GroupNorm(2, 4), nn.SiLU(), nn.ReLU(inplace=True), nn.GroupNorm(4, 4), nn.ReLU(inplace=True)]
        rows = [nn.Flatten(2), nn.LayerNorm(36), nn.SiLU(inplace=True), nn.RMSNorm(36), nn.ReLU(inplace=True)]
        return nn.Sequential(nn.Conv2d(3, 4, 3), *groups, *rows).to(device)

    x = torch.randn(2, 3, 8, 8, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    plain, patched = model(), model()
    fusednorm.patch(patched)
    for each in (plain, patched):
        each(x).square().sum().backward()
    for ours, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
