"""Second derivatives, forward mode and torch's transforms, on the CPU and on a GPU, against plain formulas."""

from functools import partial

import fusednorm
import pytest
import torch
from fusednorm.activations import ACTIVATIONS
from fusednorm.api import operators
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.kernels.api.norm_calls import CALLS, inputs
from tests.kernels.formulas import formula, groups

# torch loads its formulas of forward mode through what it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FEW = ("layer_norm", "add_rms_norm", "add_group_norm")


@pytest.fixture
def float_device(device):
    """The device and the widest dtype that its passes take."""
    return device, torch.float32 if device.type == "cuda" else torch.float64


def detached(name, device="cpu", dtype=torch.float64):
    return [t.detach() for t in inputs(name, device, dtype)]


def total(call, *tensors):
    """A number with derivatives of every order, of all results of a call."""
    result = call(*tensors)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return sum((t.float() if t.dtype == torch.bfloat16 else t).sin().square().sum() for t in results)


def second(call, tensors):
    """Derivatives of all first derivatives, weighed and summed."""
    of_first = torch.autograd.grad(total(call, *tensors), tensors, create_graph=True, allow_unused=True)
    first = [g for g in of_first if g is not None]
    # Of one sixteenth each: what 16 bits hold.
    weights = [(torch.arange(g.numel(), device=g.device) * 7 % 16 / 16).to(g.dtype).view_as(g) for g in first]
    return torch.autograd.grad(first, tensors, weights, allow_unused=True)


def assert_same(got, want, tolerance):
    """Each tensor within `tolerance` of the norm of what it should be."""
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm() + 1e-9


def tolerance_of(dtype):
    return {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.06}[dtype]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "add_rms_norm of heads", "add_group_norm"])
def test_second_derivatives_of_the_kernels_match_the_formula(name, dtype, device, monkeypatch):
    # On the CPU the kernels are interpreted.
    passes = operators.group_norm_passes if "group" in name else operators.layer_norm_passes
    monkeypatch.setattr(operators, "_library", lambda op, x: passes)
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


TRANSFORMS = {
    "grad": grad,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jvp of jvp": lambda f: lambda x: jvp(lambda y: jvp(f, (y,), (x,))[1], (x,), (x,))[1],
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x.detach(),))[1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FEW)
def test_transforms_of_functions(name, transform, float_device):
    device, dtype = float_device
    tensors = detached(name, device, dtype)
    got, want = (
        TRANSFORMS[transform](lambda x, c=call: total(c, x, *tensors[1:]))(tensors[0])
        for call in (CALLS[name], formula(name))
    )
    assert_same([got], [want], tolerance_of(dtype))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "seed": 7}])
@pytest.mark.parametrize("name", FEW)
def test_a_batch_is_what_its_samples_are_one_by_one(name, options, float_device):
    device, dtype = float_device
    x, w, b, r = detached(name, device, dtype)
    xs, ws = (torch.stack([t, 2 * t + 1, t - 3]) for t in (x, w))

    def call(x, w):
        return total(partial(CALLS[name], **options), x, w, b, r)

    for function in (call, grad(call), grad(call, argnums=1)):
        for in_dims in ((0, None), (None, 0), (0, 0)):
            batched = [t if dim is None else many for t, many, dim in zip((x, w), (xs, ws), in_dims, strict=True)]
            got = vmap(function, in_dims)(*batched)
            for i, sample in enumerate(got):
                want = function(*(t if d is None else t[i] for t, d in zip(batched, in_dims, strict=True)))
                assert_same([sample], [want], tolerance_of(dtype))


def test_rows_may_be_batched_along_any_axis(float_device):
    device, dtype = float_device
    x = torch.randn(2, 3, 4, device=device, dtype=dtype)
    want = fusednorm.layer_norm(x)
    torch.testing.assert_close(vmap(fusednorm.layer_norm, in_dims=1, out_dims=1)(x), want)
    columns = x.movedim(1, 2)
    torch.testing.assert_close(vmap(fusednorm.layer_norm, in_dims=2, out_dims=1)(columns), want)


def test_groups_that_a_batch_tears_apart_are_refused(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    with pytest.raises(fusednorm.UnsupportedShapeError, match="must be contiguous or channels-last"):
        vmap(lambda x: fusednorm.group_norm(x, 2), in_dims=1)(x)


def test_dropout_without_a_seed_says_that_vmap_is_not_for_it(device):
    x = torch.randn(2, 3, 4, device=device)
    with pytest.raises(RuntimeError, match="vmap: called random operation while in randomness error mode"):
        vmap(lambda x: fusednorm.layer_norm(x, dropout=0.5))(x)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (fusednorm.LayerNorm(4, activation="silu"), (3, 4)),
        (fusednorm.LayerNorm((2, 3)), (3, 2, 3)),
        (fusednorm.RMSNorm(4, weight_offset=1.0), (3, 4)),
        (fusednorm.GroupNorm(2, 4), (3, 4, 5)),
    ],
)
def test_modules_are_called_functionally_and_differentiated_twice(module, shape, float_device):
    device, dtype = float_device
    module = module.to(device, dtype)
    parameters = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    x = torch.randn(shape, device=device, dtype=dtype)

    def call(parameters, x):
        return functional_call(module, parameters, (x,)).sin().sum()

    first = grad(call)(parameters, x)
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    wanted = torch.autograd.grad(call(leaves, x), tuple(leaves.values()), create_graph=True)
    assert_same(first.values(), wanted, tolerance_of(dtype))
    twice = grad(lambda p: sum(g.square().sum() for g in grad(call)(p, x).values()))(parameters)
    again = torch.autograd.grad(sum(g.square().sum() for g in wanted), tuple(leaves.values()))
    assert_same(twice.values(), again, tolerance_of(dtype))
    directional = jvp(lambda x: call(parameters, x), (x,), (x,))[1]
    torch.testing.assert_close(directional, (grad(call, argnums=1)(parameters, x) * x).sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_backward_operators_keep_torchs_contract(op):
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
    if op == "group_norm":
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", ["grad", "jacfwd"])
def test_transforms_compile_whole(transform, backend, device):
    x, w, b, _ = detached("layer_norm", device, torch.float32)
    torch._dynamo.reset()
    step = TRANSFORMS[transform](lambda x: total(CALLS["layer_norm"], x, w, b, None))
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), step(x), rtol=1e-4, atol=1e-4)


def test_tangents_within_a_compiled_function_go_through(device):
    x, w, b, _ = detached("layer_norm", device, torch.float32)

    def step(x):
        with forward_ad.dual_level():
            dual = total(CALLS["layer_norm"], forward_ad.make_dual(x, x), w, b, None)
            return forward_ad.unpack_dual(dual).tangent

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), step(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_a_first_derivative_alone_takes_no_operator(name, device, monkeypatch):
    """Where nobody asks for a second one, the way to the pass is the short one."""
    tensors = inputs(name, device, torch.float32)
    monkeypatch.setattr(operators, "derivative_of_plain", None)
    monkeypatch.setattr(torch.ops.fusednorm, f"{name.removeprefix('add_').split()[0]}_backward", None)
    torch.autograd.grad(total(CALLS[name], *tensors), tensors, allow_unused=True)


def test_scale_and_shift_are_differentiated_in_every_mode(float_device):
    device, dtype = float_device
    x, w, b, _ = detached("group_norm", device, dtype)
    both = torch.randn(2, x.shape[0], x.shape[1], device=device, dtype=dtype)

    def ours(both):
        return fusednorm.group_norm(x, 2, w, b, scale=both[0], shift=both[1], activation="gelu").sin().sum()

    def theirs(both):
        return groups("group_norm", x, w, b, None, "gelu", *both).sin().sum()

    for transform in (grad, hessian, jacfwd):
        assert_same([transform(ours)(both)], [transform(theirs)(both)], tolerance_of(dtype))
