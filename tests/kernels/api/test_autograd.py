"""The differentiable functions and modules, on the CPU where they run on the oracle and on a GPU on the kernels."""

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.arguments.checks import ACTIVATIONS
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kernels.api.norm_calls import CALLS, Dispatched, inputs


@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_finite_differences(name):
    call = CALLS[name]
    assert torch.autograd.gradcheck(lambda *t: call(*t), inputs(name))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_through_activation_and_dropout_match_finite_differences(activation):
    def call(x, w, b, r):
        return fusednorm.add_layer_norm(x, r, w, b, activation=activation, dropout=0.3, seed=5)

    assert torch.autograd.gradcheck(call, inputs("add_layer_norm"))


def test_gradients_of_scale_and_shift_match_finite_differences():
    x, w, b, r = inputs("add_group_norm")
    both = torch.randn(x.shape[0], 2 * x.shape[1], dtype=x.dtype, requires_grad=True)

    def call(x, w, b, r, both):
        scale, shift = both.chunk(2, dim=1)
        return fusednorm.add_group_norm(x, r, 2, w, b, scale=scale, shift=shift, activation="silu")

    assert torch.autograd.gradcheck(call, (x, w, b, r, both))


def test_a_group_norm_module_takes_scale_and_shift(device):
    module = fusednorm.GroupNorm(2, 6, activation="silu", device=device)
    x, scale, shift = (torch.randn(3, 6, *size, device=device) for size in ((4,), (), ()))
    expected = F.silu(F.group_norm(x, 2) * (1 + scale[..., None]) + shift[..., None])
    torch.testing.assert_close(module(x, scale, shift), expected)


def test_expanded_gradients_are_taken(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    fusednorm.layer_norm(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm", "add_group_norm"])
def test_each_input_gets_its_gradient_in_its_own_dtype(name, device):
    x, w, b, r = inputs(name, device, torch.float32)
    half, stream = (t.detach().clone().requires_grad_() for t in (x.bfloat16(), r))
    h = half.float() + stream
    want = CALLS[name.removeprefix("add_")](h, w, b, r)
    y, residual_out = CALLS[name](half, w, b, stream)
    assert residual_out.dtype == (torch.bfloat16 if "group" in name else torch.float32)
    torch.testing.assert_close(y.float(), want, rtol=2**-7, atol=2**-7)
    torch.autograd.backward([y, residual_out], [torch.ones_like(y), torch.ones_like(residual_out)])
    (right,) = torch.autograd.grad([want, h], [stream], [torch.ones_like(want), torch.ones_like(h)])
    assert (half.grad.dtype, stream.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(half.grad.float(), right, rtol=2**-7, atol=1e-4)
    tolerance = 2**-7 if "group" in name else 1e-5
    torch.testing.assert_close(stream.grad, right, rtol=tolerance, atol=1e-4)


def test_only_the_sum_may_be_used(device):
    x, r = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    fusednorm.add_rms_norm(x, r).residual_out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(r.grad, torch.ones_like(r))


@pytest.mark.parametrize("name", CALLS)
def test_float8_is_not_differentiated(name, device):
    x, w, b, r = (t.detach() for t in inputs(name, device, torch.float32))
    with pytest.raises(fusednorm.KernelInputError, match=r"x must be float32, float16.* got torch\.float8_e4m3fn"):
        CALLS[name](x.to(torch.float8_e4m3fn), w, b, r)


MODULES = [
    (nn.LayerNorm, fusednorm.LayerNorm, ((4, 6),), (5, 4, 6)),
    (nn.LayerNorm, fusednorm.LayerNorm, (16,), (2, 3, 16)),
    (nn.RMSNorm, fusednorm.RMSNorm, (16,), (5, 16)),
    (nn.GroupNorm, fusednorm.GroupNorm, (2, 6), (3, 6, 4, 4)),
]


@pytest.mark.parametrize(("theirs", "ours", "arguments", "shape"), MODULES)
def test_modules_are_drop_ins(theirs, ours, arguments, shape, device):
    torch_module, module = theirs(*arguments, device=device), ours(*arguments, device=device)
    for parameter in torch_module.parameters():
        nn.init.normal_(parameter)
    module.load_state_dict(torch_module.state_dict())
    assert repr(module) == repr(torch_module)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(module(x), torch_module(x))
    fused = ours(*arguments, device=device, activation="silu")
    fused.load_state_dict(torch_module.state_dict())
    torch.testing.assert_close(fused(x), F.silu(torch_module(x)))
    assert "activation='silu'" in repr(fused)


@pytest.mark.parametrize("ours", [fusednorm.LayerNorm, fusednorm.RMSNorm])
def test_modules_with_a_weight_around_zero_start_as_the_same_function(ours, device):
    plain, centred = ours(6, device=device), ours(6, device=device, weight_offset=1.0)
    x = torch.randn(3, 6, device=device)
    assert not centred.weight.any()
    torch.testing.assert_close(centred(x), plain(x))
    nn.init.normal_(centred.weight)
    with torch.no_grad():
        plain.weight.copy_(centred.weight + 1)
    torch.testing.assert_close(centred(x), plain(x))
    assert "weight_offset=1.0" in repr(centred)
    with pytest.raises(fusednorm.KernelInputError, match="weight_offset needs a weight"):
        ours(6, elementwise_affine=False, weight_offset=1.0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("ours", [fusednorm.LayerNorm, fusednorm.RMSNorm])
@pytest.mark.parametrize(
    ("normalized_shape", "shape"),
    [
        ((2, 3), (5, 3, 2)),
        ((2, 3), (5, 6)),
        ((6,), (5, 3)),
        ((2, 3), (3,)),
        ((1,), ()),
        ((), (5, 6)),
        ((2, 3), (6,)),
    ],
)
def test_modules_refuse_other_shapes_than_theirs(ours, normalized_shape, shape, affine, device):
    module = ours(normalized_shape, elementwise_affine=affine, device=device)
    with pytest.raises(fusednorm.KernelInputError):
        module(torch.randn(shape, device=device))


def test_a_parameter_that_was_put_in_another_shape_is_refused(device):
    module = fusednorm.LayerNorm((2, 3), device=device)
    x = torch.randn(5, 2, 3, device=device)
    module.weight = nn.Parameter(torch.ones(3, 2, device=device))
    with pytest.raises(fusednorm.KernelInputError, match=r"weight must be \[2, 3\], got \[3, 2\]"):
        module(x)


def test_modules_without_parameters(device):
    x = torch.randn(3, 6, device=device)
    module = fusednorm.LayerNorm(6, elementwise_affine=False, device=device)
    torch.testing.assert_close(module(x), F.layer_norm(x, (6,)))


NESTED = {
    "layer_norm": (fusednorm.LayerNorm(8), lambda x: x),
    "layer_norm without parameters": (fusednorm.LayerNorm(8, elementwise_affine=False), lambda x: x),
    "layer_norm of two axes": (fusednorm.LayerNorm((2, 8)), lambda x: x.unflatten(-1, (2, 8))),
    "rms_norm of heads": (fusednorm.RMSNorm(8), lambda x: x.unflatten(-1, (2, 8)).transpose(1, 2)),
}


@pytest.mark.parametrize("case", NESTED)
def test_rows_of_nested_tensors_are_normalised(case, device):
    module, view = NESTED[case]
    module = module.to(device)
    parts = [torch.randn(length, 16, device=device, requires_grad=True) for length in (2, 5, 3)]
    if "two" not in case and "heads" not in case:
        parts = [part.detach()[:, :8].requires_grad_() for part in parts]
    x = view(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
    y = module(x)
    assert y.shape == x.shape
    for got, row in zip(y.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, module(row))
    gradients = torch.autograd.grad((y * x).values().sum(), parts, retain_graph=True)
    wanted = torch.autograd.grad(sum((module(row) * row).sum() for row in x.unbind()), parts)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)


def test_a_nested_residual_is_added(device):
    x, residual = (
        torch.nested.nested_tensor_from_jagged(torch.randn(10, 8, device=device), offsets)
        for offsets in [torch.tensor([0, 2, 7, 10], device=device)]
        for _ in range(2)
    )
    y, residual_out = fusednorm.add_rms_norm(x, residual)
    torch.testing.assert_close(residual_out.values(), x.values() + residual.values())
    torch.testing.assert_close(y.values(), fusednorm.rms_norm(residual_out.values()))
    with pytest.raises(fusednorm.KernelInputError, match="residual must be a nested tensor"):
        fusednorm.add_rms_norm(x, residual.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_other_nested_tensors_are_refused(device):
    parts = [torch.randn(length, 8, device=device) for length in (2, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for call in (
        lambda: fusednorm.layer_norm(torch.nested.nested_tensor(parts)),
        lambda: fusednorm.layer_norm(jagged.transpose(1, 2)),
        lambda: fusednorm.group_norm(jagged.transpose(1, 2), 2),
    ):
        with pytest.raises(fusednorm.KernelInputError, match=r"a nested x must have the layout torch\.jagged"):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_the_results_are_the_same(name, device):
    tensors = inputs(name, device, torch.float32)
    with_gradients = CALLS[name](*tensors)
    with torch.no_grad():
        without = CALLS[name](*tensors)
    detached = CALLS[name](*(t.detach() for t in tensors))
    for result in (without, detached):
        assert type(result) is type(with_gradients)
        for got, want in zip(result, with_gradients, strict=True):
            torch.testing.assert_close(got, want.detach())
            assert not got.requires_grad


def gradients(name, tensors, weights):
    """Results, weighed and summed, and the gradient of every input."""
    result = CALLS[name](*tensors)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    total = sum((t * w).sum() for t, w in zip(results, weights, strict=False))
    return (*results, *torch.autograd.grad(total, tensors, allow_unused=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_watched_call_and_one_that_is_not_are_the_same(name, device):
    tensors = inputs(name, device, torch.float32)
    weights = torch.randn(2, *tensors[0].shape, device=device)
    with Dispatched() as seen:
        watched = gradients(name, tensors, weights)
    assert len(seen.names) == 2
    for got, want in zip(gradients(name, tensors, weights), watched, strict=True):
        assert got is want is None or torch.equal(got, want)
        assert got is None or got.dtype == want.dtype


def test_only_the_backward_pass_may_be_watched(device):
    x, w, b, r = inputs("add_layer_norm", device, torch.float32)
    y, _ = fusednorm.add_layer_norm(x, r, w, b)
    with Dispatched() as seen:
        torch.autograd.grad(y.square().sum(), (x, w, b, r))
    assert seen.names == ["fusednorm::layer_norm_backward"]


def test_only_what_the_backward_pass_needs_is_saved(device):
    x, w, b, r = inputs("add_layer_norm", device, torch.float32)
    saved = []

    def keep(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fusednorm.add_layer_norm(x, r, w, b)
        fusednorm.rms_norm(x)
        with torch.no_grad():
            fusednorm.add_layer_norm(x, r, w, b)
        fusednorm.layer_norm(x.detach())
    assert saved == [(3, 4), (4,), (4,), (3, 4), (3,), (3,), (3, 4), (3,)]


def test_a_graph_is_gone_through_once(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    y = fusednorm.layer_norm(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_an_input_that_was_changed_is_not_differentiated(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    h = x * 1
    y = fusednorm.layer_norm(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("name", ["add_layer_norm", "add_group_norm"])
def test_nothing_that_was_changed_is_differentiated(name, changed, device):
    tensors = inputs(name, device, torch.float32)
    copies = [t * 1 for t in tensors]
    y, _ = CALLS[name](*copies)
    copies[changed].detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("trained", range(4))
@pytest.mark.parametrize("name", ["add_layer_norm", "add_group_norm"])
def test_only_what_is_trained_gets_a_gradient(name, trained, device):
    tensors = inputs(name, device, torch.float32)
    alone = [t.detach().requires_grad_(i == trained) for i, t in enumerate(tensors)]
    for given in (tensors, alone):
        y, residual_out = CALLS[name](*given)
        (y.sin().sum() + residual_out.square().sum()).backward()
    assert [t.grad is not None for t in alone] == [i == trained for i in range(4)]
    torch.testing.assert_close(alone[trained].grad, tensors[trained].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_dtype(dtype, device):
    x, w, b, _ = inputs("layer_norm", device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y = fusednorm.layer_norm(x.to(dtype), w, b)
    y.float().sum().backward()
    assert y.dtype == dtype
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (torch.float32,) * 3


def test_checkpointed_calls_are_differentiated(device):
    x, w, b, _ = inputs("layer_norm", device, torch.float32)

    def call(x):
        return fusednorm.layer_norm(2 * x, w, b).square().sum()

    want = torch.autograd.grad(call(x), (x, w, b))
    got = torch.autograd.grad(checkpoint(call, x, use_reentrant=False), (x, w, b))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
