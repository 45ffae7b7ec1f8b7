"""Norms of all strides that torch takes: axes of one element, permuted and expanded axes, both memory formats."""

import random
from itertools import permutations

import fusednorm
import pytest
import torch
from fusednorm.tensors.layouts import is_in_layout
from torch import nn

from tests.kernels.cpu.calls import of_rows

OPS = ("layer_norm", "rms_norm", "group_norm")
EPS = 0.1
"""So large that equal values, whose deviations are rounding errors, do not have large derivatives."""


def stored_otherwise(values, chance):
    """The values with their axes in another order in memory, or expanded, and strides of axes of one element."""
    axes = range(values.dim())
    channels_last = (0, *axes[2:], 1)
    order = chance.choice([tuple(axes), channels_last, chance.choice(list(permutations(axes)))])
    stored = values.permute(order).contiguous().permute([order.index(axis) for axis in axes])
    strides = [
        chance.choice([stride, 0, 1, 3, 1000]) if size == 1 else stride
        for size, stride in zip(stored.shape, stored.stride(), strict=True)
    ]
    stored = stored.as_strided(stored.shape, strides)
    axis = chance.choice([*axes, *[None] * 10])
    return stored if axis is None else stored.narrow(axis, 0, 1).expand(values.shape)


def random_shape(chance):
    """[N, C, *spatial], mostly with axes of one element."""
    count = chance.choice([0, 1, 2, 2, 2, 2, 3])
    return (chance.choice([1, 1, 2]), chance.choice([1, 2, 4, 6]), *chance.choices([1, 2, 2, 3], k=count))


def torchs(op, shape):
    """torch's module with random parameters."""
    if op == "group_norm":
        module = nn.GroupNorm(2 - shape[1] % 2, shape[1], EPS)
    else:
        module = (nn.LayerNorm if op == "layer_norm" else nn.RMSNorm)(shape[-1], eps=EPS)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def groups_of(module):
    return module.num_groups, module.weight, module.bias, module.eps


def results(compute, module, x, dy):
    """y and the gradients of x and the module's parameters."""
    leaves = [x.detach().requires_grad_(), *module.parameters()]
    y = compute(leaves[0])
    return [y, *torch.autograd.grad(y, leaves, dy)]


def assert_close(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_one_image_of_height_width_and_channels_is_computed_as_two_are(batch):
    image = torch.randn(16, 16, 32).permute(2, 0, 1)[None]
    x = image if batch == 1 else torch.randn(batch, 16, 16, 32).permute(0, 3, 1, 2)
    module = torchs("group_norm", x.shape)
    own = torchs("group_norm", x.shape)
    own.load_state_dict(module.state_dict())
    fusednorm.patch(own)
    for given in (x, x.to(torch.bfloat16)):
        found = results(own, own, given, given)
        assert is_in_layout(found[0], True)
        wanted = results(lambda t: module(t.float().contiguous()).to(t.dtype), module, given, given)
        tolerance = 1e-4 if given is x else 0.02
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("op", OPS)
def test_functions_and_patched_modules_compute_all_strides(op, activation, count):
    chance = random.Random(20)
    for _ in range(count):
        shape = random_shape(chance)
        module = torchs(op, shape)
        x, dy, residual = (stored_otherwise(torch.randn(shape), chance) for _ in range(3))
        act = nn.SiLU() if activation == "silu" else nn.Identity()
        parameters = list(module.parameters())
        groups = () if of_rows(op) else (module.num_groups,)

        def by_torch(t, op=op, module=module, act=act):
            t = t.contiguous().view(t.shape)
            # torch.nn's refuses one value for each channel.
            return act(module(t) if of_rows(op) else torch.group_norm(t, *groups_of(module)))

        def by_function(t, groups=groups, parameters=parameters):
            return getattr(fusednorm, op)(t, *groups, *parameters, eps=EPS, activation=activation)

        def after_sum(t, residual=residual, groups=groups, parameters=parameters):
            function = getattr(fusednorm, f"add_{op}")
            return function(t, residual, *groups, *parameters, eps=EPS, activation=activation).y

        def after_torchs_sum(t, residual=residual, by_torch=by_torch):
            return by_torch(t + residual)

        wanted = results(by_torch, module, x, dy)
        patched = torchs(op, shape)
        patched.load_state_dict(module.state_dict())
        fusednorm.patch(patched)
        assert_close(results(lambda t, m=patched, a=act: a(m(t)), patched, x, dy), wanted)
        found = results(by_function, module, x, dy)
        assert_close(found, wanted)
        if op == "group_norm" and (is_in_layout(x, False) or is_in_layout(x, True)):
            assert is_in_layout(found[0], not is_in_layout(x, False))
        with torch.no_grad():
            torch.testing.assert_close(by_function(x), found[0].detach(), rtol=1e-5, atol=1e-5)
        assert_close(results(after_sum, module, x, dy), results(after_torchs_sum, module, x, dy))
