"""Second derivatives and forward mode, on the CPU and on a GPU, against plain formulas."""

from functools import partial
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.api import operators
from fusednorm.arguments.checks import ACTIVATIONS
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp

from tests.kernels.api.derivatives.comparisons import FEW, assert_same, detached, second, tolerance_of, total
from tests.kernels.api.derivatives.formulas import formula
from tests.kernels.api.norm_calls import CALLS, inputs
from tests.sampling import mark_rest_slow

# torch loads its formulas of forward mode through what it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_match_finite_differences(name):
    assert torch.autograd.gradgradcheck(lambda *t: CALLS[name](*t), inputs(name), fast_mode=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_through_activation_and_dropout_match_finite_differences(activation):
    def call(x, w, b, r):
        return fusednorm.add_layer_norm(x, r, w, b, activation=activation, dropout=0.3, seed=5)

    assert torch.autograd.gradgradcheck(call, inputs("add_layer_norm"), fast_mode=True)


def test_second_derivatives_of_scale_and_shift_match_finite_differences():
    x, w, b, r = inputs("add_group_norm")
    scale, shift = (torch.randn(x.shape[:2], dtype=x.dtype, requires_grad=True) for _ in range(2))

    def call(x, w, b, r, scale, shift):
        return fusednorm.add_group_norm(x, r, 2, w, b, scale=scale, shift=shift, activation="silu")

    assert torch.autograd.gradgradcheck(call, (x, w, b, r, scale, shift), fast_mode=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    mark_rest_slow(
        product(
            [
                "layer_norm",
                "add_layer_norm",
                "add_rms_norm of heads",
                "add_layer_norm of samples",
                "add_group_norm",
            ],
            [torch.float32, torch.bfloat16],
        ),
        together=1,
    ),
)
def test_second_derivatives_of_the_kernels_match_the_formula(name, dtype, device, on_kernels):
    tensors = inputs(name, device, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    got, want = second(CALLS[name], tensors), second(formula(name), wide)
    assert all(ours is None or ours.dtype == dtype for ours in got)
    assert_same(got, want, tolerance_of(dtype))


def test_second_derivatives_keep_to_channels_last(float_device):
    device, dtype = float_device
    x, dy = (
        torch.randn(2, 4, 3, 5, device=device, dtype=dtype).to(memory_format=torch.channels_last) for _ in "xy"
    )
    w, b = torch.randn(2, 4, device=device, dtype=dtype)

    def both(call):
        leaf, of_y = x.clone().requires_grad_(), dy.clone().requires_grad_()
        (dx,) = torch.autograd.grad(call(leaf, w, b, None), leaf, of_y, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (leaf, of_y))

    got = both(CALLS["group_norm"])
    assert_same(got, both(formula("group_norm")), tolerance_of(dtype))


@pytest.mark.parametrize("name", FEW)
def test_third_derivatives(name):
    tensors = detached(name)
    third = [
        grad(lambda x, c=call: grad(lambda x: total(c, x, *tensors[1:]).sin())(x).square().sum())
        for call in (CALLS[name], formula(name))
    ]
    got, want = (jacrev(derivative)(tensors[0]) for derivative in third)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", FEW)
def test_only_what_requires_a_gradient_is_differentiated_twice(name, float_device):
    device, dtype = float_device
    x, w, b, r = detached(name, device, dtype)
    w.requires_grad_()
    second(lambda w: CALLS[name](x, w, b, r), [w])
    got, want = (second(lambda w, c=call: c(x, w, b, r), [w]) for call in (CALLS[name], formula(name)))
    assert_same(got, want, tolerance_of(dtype))
    assert x.grad is b.grad is r.grad is None


@pytest.mark.parametrize("name", CALLS)
def test_tangents_go_through(name, float_device):
    device, dtype = float_device
    tensors, tangents = detached(name, device, dtype), detached(name, device, dtype)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, dt) for t, dt in zip(tensors, tangents, strict=True)]
        got = forward_ad.unpack_dual(total(CALLS[name], *duals)).tangent
    _, transformed = jvp(partial(total, CALLS[name]), tuple(tensors), tuple(tangents))
    _, want = jvp(partial(total, formula(name)), tuple(tensors), tuple(tangents))
    for ours in (got, transformed):
        torch.testing.assert_close(ours, want, rtol=tolerance_of(dtype), atol=1e-3 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("name", FEW)
def test_tangents_of_one_tensor_alone_go_through(name):
    tensors = detached(name)
    for place, tensor in enumerate(tensors):

        def of_one(call, t, place=place):
            return total(call, *tensors[:place], t, *tensors[place + 1 :])

        got, want = (jvp(partial(of_one, call), (tensor,), (tensor,))[1] for call in (CALLS[name], formula(name)))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", FEW)
def test_tangents_go_through_the_backward_pass(name):
    tensors, direction = inputs(name), detached(name)[0]

    def of_gradient(call):
        # The forward pass may be before there are tangents, or among them.
        y = total(call, *tensors)
        with forward_ad.dual_level():
            seed = forward_ad.make_dual(torch.ones_like(y), torch.full_like(y, 3.0))
            late = torch.autograd.grad(y, tensors[0], seed)
            dual = forward_ad.make_dual(tensors[0], direction)
            early = torch.autograd.grad(total(call, dual, *tensors[1:]), dual)
            return [forward_ad.unpack_dual(t).tangent for t in (*late, *early)]

    for got, want in zip(of_gradient(CALLS[name]), of_gradient(formula(name)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("op", "dispatches"),
    [
        ("layer_norm", False),
        ("rms_norm", False),
        ("group_norm", False),
        pytest.param("group_norm", True, marks=pytest.mark.slow),
    ],
)
def test_backward_operators_keep_torchs_contract(op, dispatches):
    x, w, b, r = inputs(op, dtype=torch.float32)
    dy, outside = (torch.randn_like(x).requires_grad_() for _ in range(2))
    scale = shift = None
    if op == "group_norm":
        scale, shift = (torch.randn(x.shape[:2], requires_grad=True) for _ in range(2))
    bias = None if op == "rms_norm" else b
    settings = 2, 1e-5, 0.0, "silu", 0.0, 0
    with torch.no_grad():
        _, mean, rstd, _ = getattr(torch.ops.fusednorm, op)(x, w, bias, r, scale, shift, *settings)
    operator = getattr(torch.ops.fusednorm, f"{op}_backward").default
    statistics = None if op == "rms_norm" else mean, rstd
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if dispatches:
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(
        operator, (dy, x, w, bias, *statistics, r, scale, shift, outside, *settings), test_utils=checks
    )
    with pytest.raises(fusednorm.KernelInputError, match="rstd must not require a gradient"):
        operator(dy, x, w, bias, None, rstd.requires_grad_(), r, scale, shift, outside, *settings)


@pytest.mark.parametrize("name", FEW)
def test_operators_are_differentiated_twice_as_functions_are(name):
    x, w, b, r = inputs(name)
    op = name.removeprefix("add_")

    def operator(x, w, b, r):
        residual = r if name.startswith("add_") else None
        settings = (2 if op == "group_norm" else 0, 1e-6 if op == "rms_norm" else 1e-5, 0.0, "none", 0.0, 0)
        bias = None if op == "rms_norm" else b
        y, _, _, h = getattr(torch.ops.fusednorm, op)(x, w, bias, residual, None, None, *settings)
        return y if residual is None else (y, h)

    tensors = [x, w, b, r]
    assert_same(second(operator, tensors), second(formula(name), tensors), 1e-9)


def test_a_compiled_call_refuses_a_second_derivative(device):
    x, w, b, _ = inputs("layer_norm", device, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fusednorm.layer_norm(x, w, b).square().sum(), backend="aot_eager")
    (dx,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dx.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_first_derivative_alone_takes_no_operator(name, device, monkeypatch):
    """Where nobody asks for a second one, the way to the pass is the short one."""
    tensors = inputs(name, device, torch.float32)
    monkeypatch.setattr(operators, "differentiate_plain_operator", None)
    monkeypatch.setattr(torch.ops.fusednorm, f"{name.removeprefix('add_').split()[0]}_backward", None)
    torch.autograd.grad(total(CALLS[name], *tensors), tensors, allow_unused=True)
