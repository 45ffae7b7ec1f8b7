"""The slope of leaky_relu: in functions, modules and traced calls, where each slope is a call of its own kind."""

from itertools import product

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError

from tests.kernels.api.norm_calls import CALLS, inputs
from tests.sampling import mark_rest_slow

PLAIN = [name for name in CALLS if " " not in name]


@pytest.mark.parametrize("name", PLAIN)
def test_each_slope_is_torchs(name):
    given = inputs(name)
    for slope in (0.25, -0.5, 0.0, 0.25):
        z, y = (CALLS[name](*given, **options) for options in ({}, of_slope(slope)))
        z, y = (each if isinstance(each, torch.Tensor) else each[0] for each in (z, y))
        want = F.leaky_relu(z, slope)
        torch.testing.assert_close(y, want)
        dy = torch.randn_like(y)
        used = [
            each
            for each in given
            if torch.autograd.grad(want.sum(), each, retain_graph=True, allow_unused=True)[0] is not None
        ]
        torch.testing.assert_close(*(torch.autograd.grad(each, used, dy) for each in (y, want)))


def of_slope(slope):
    return {"activation": "leaky_relu", "negative_slope": slope}


def test_the_derivative_at_zero_is_the_slope():
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    fusednorm.layer_norm(x, None, bias, **of_slope(0.25)).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 0.5))


@pytest.mark.parametrize("name", PLAIN)
def test_another_activation_takes_no_slope(name):
    for options in ({}, {"activation": "relu"}):
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(KernelInputError, match="negative_slope needs activation leaky_relu"):
                CALLS[name](*inputs(name, dtype=dtype), negative_slope=0.25, **options)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_scale_with_a_wrong_option_is_refused(op):
    x, scale = torch.randn(2, 3, 8), torch.randn(2, 8)
    for options in ({"negative_slope": 0.25}, {"activation": "mish"}):
        with pytest.raises(KernelInputError):
            getattr(fusednorm, op)(x, scale=scale, **options)


def test_torch_compile_has_no_graph_break():
    def block(x, scale):
        y = fusednorm.layer_norm(x, scale=scale, **of_slope(0.25))
        return fusednorm.rms_norm(y, **of_slope(-0.5))

    given = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(given[0])
    results = [(run(*given), torch.autograd.grad(run(*given), given, dy)) for run in (block, compiled)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("op", "slope"), mark_rest_slow(product(["layer_norm", "rms_norm", "group_norm"], [(), (0.25,)]), together=1)
)
def test_operators_take_a_slope_or_none(op, slope):
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    options = 2 if op == "group_norm" else 0, 1e-5, 0.0, "leaky_relu", 0.0, 0, *slope
    arguments = (x, None, None, None, None, None, *options)
    torch.library.opcheck(getattr(torch.ops.fusednorm, op).default, arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: fusednorm.LayerNorm(8, **options),
        lambda **options: fusednorm.RMSNorm(8, **options),
        lambda **options: fusednorm.GroupNorm(2, 4, **options),
    ],
)
def test_modules_take_a_slope(make):
    x = torch.randn(3, 4, 8)
    module = make(**of_slope(0.25))
    torch.testing.assert_close(module(x), F.leaky_relu(make()(x), 0.25))
    assert repr(module).endswith("activation='leaky_relu', negative_slope=0.25)")
    with pytest.raises(KernelInputError, match="negative_slope needs activation leaky_relu"):
        make(negative_slope=0.25)
