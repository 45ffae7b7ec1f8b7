"""torch's transforms of the functions, on the CPU and on a GPU, against plain formulas."""

from functools import partial

import fusednorm
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.kernels.api.derivatives.comparisons import FEW, assert_same, detached, tolerance_of, total
from tests.kernels.api.derivatives.formulas import formula, groups
from tests.kernels.api.norm_calls import CALLS

# torch loads its formulas of forward mode through what it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


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
@pytest.mark.parametrize("name", [*FEW, "add_layer_norm of samples"])
def test_transforms_of_functions(name, transform, float_device):
    device, dtype = float_device
    tensors = detached(name, device, dtype)
    got, want = (
        TRANSFORMS[transform](lambda x, c=call: total(c, x, *tensors[1:]))(tensors[0])
        for call in (CALLS[name], formula(name))
    )
    assert_same([got], [want], tolerance_of(dtype))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "seed": 7}])
@pytest.mark.parametrize("name", [*FEW, "add_layer_norm of samples"])
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


def test_groups_may_be_batched_along_any_axis(float_device):
    device, dtype = float_device
    x = torch.randn(2, 3, 4, 5, device=device, dtype=dtype)
    for axis in range(4):
        samples = [fusednorm.group_norm(sample.contiguous(), 1) for sample in x.unbind(axis)]
        got = vmap(lambda x: fusednorm.group_norm(x, 1), in_dims=axis)(x)
        torch.testing.assert_close(got, torch.stack(samples))


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


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
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


def batched_derivatives(call, tensors):
    """Derivatives that torch.autograd computes for a batch of directions."""
    x, *others = tensors
    of_x = partial(total, call)
    jacobian = torch.autograd.functional.jacobian(lambda x: call(x, *others), x, vectorize=True)
    hessian = torch.autograd.functional.hessian(lambda x: of_x(x, *others), x, vectorize=True)
    leaves = [t.clone().requires_grad_() for t in tensors]
    of_results = torch.tensor([1.0, -2.0, 0.5], device=x.device, dtype=x.dtype)
    batched = torch.autograd.grad(of_x(*leaves), leaves, of_results, is_grads_batched=True, allow_unused=True)
    return (*((jacobian,) if isinstance(jacobian, torch.Tensor) else jacobian), hessian, *batched)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm of heads"])
def test_batches_of_gradients_match_the_formula(name, float_device):
    device, dtype = float_device
    tensors = detached(name, device, dtype)
    got, want = (batched_derivatives(call, tensors) for call in (CALLS[name], formula(name)))
    assert_same(got, want, tolerance_of(dtype))


@pytest.mark.parametrize("name", [*FEW, "rms_norm", "group_norm"])
def test_batches_of_gradients_of_the_kernels_match_the_formula(name, device, on_kernels):
    tensors = detached(name, device, torch.float32)
    got, want = (batched_derivatives(call, tensors) for call in (CALLS[name], formula(name)))
    assert_same(got, want, tolerance_of(torch.float32))
