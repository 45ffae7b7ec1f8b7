"""What autograd and the rest of torch ask of modules that normalise in a service."""

import pytest
import torch
from normserve.client import torch as remote
from normserve.client.local.connection import LocalTransport
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.integration.clients.torch_modules.pairs import assert_same, pair, passes, random

SMALL = {"layer norm": (2, 16), "RMS norm of two axes": (2, 4, 8), "group norm": (1, 12, 2)}


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
def test_gradients_are_those_of_the_function(one, kind, activation):
    _, module, _ = pair(one, kind, activation=activation)
    names = [name for name, _ in module.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = random(*SMALL[kind], seed=2).requires_grad_(), *module.parameters()
    # The service has no float64: wide differences, and the tolerance that they and float32 need.
    assert torch.autograd.gradcheck(function, inputs, eps=2e-2, atol=2e-2, rtol=1e-2, nondet_tol=0, fast_mode=True)


@pytest.mark.parametrize("kind", ["layer norm", "group norm"])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_frozen_parameters_cost_and_get_no_gradient(one, kind, activation):
    reference, module, shape = pair(one, kind, activation=activation)
    for each in (reference, module):
        each.bias.requires_grad_(False)
    x = random(*shape)
    for each in (reference, module):
        each(x).square().sum().backward()
    assert_same([module.weight.grad], [reference.weight.grad])
    assert module.bias.grad is None
    # An activation's derivative needs the bias; nothing else does.
    assert ("bias" in one.calls[-1].tensors) == (activation != "none")
    for each in (reference, module):
        each.requires_grad_(False)
    (got, expected) = (
        torch.autograd.grad(each(leaf).square().sum(), leaf)
        for each, leaf in ((module, x.clone().requires_grad_()), (reference, x.clone().requires_grad_()))
    )
    assert_same(got, expected)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "nothing requires a gradient"])
def test_without_gradients_nothing_is_asked_for_or_kept(one, how):
    reference, module, shape = pair(one, "layer norm")
    x = random(*shape)
    if how == "nothing requires a gradient":
        module.requires_grad_(False)
        y = module(x)
    else:
        with getattr(torch, how)():
            y = module(x.requires_grad_())
    assert y.grad_fn is None
    assert not y.requires_grad
    assert "stats" not in one.calls[0].params
    with torch.no_grad():
        assert_same([y], [reference(x)])


def test_what_backward_needs_must_not_change(one):
    _, module, shape = pair(one, "layer norm")
    x = random(*shape)
    y = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm of two axes", "group norm"])
@pytest.mark.parametrize("is_last", [False, True])
def test_results_may_be_changed_in_place(one, kind, is_last):
    reference, module, shape = pair(one, kind)
    x = random(*shape)
    if is_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    got, expected = (passes(nn.Sequential(each, nn.ReLU(inplace=True)), x) for each in (module, reference))
    assert_same(got, expected)


def test_what_is_kept_for_long_does_not_keep_a_whole_answer(client):
    _, module, shape = pair(client, "layer norm")
    y = module(random(*shape).requires_grad_())
    assert y.data_ptr() in client.addresses
    saved = y.grad_fn.saved_tensors
    y.sum().backward()
    assert len(client.addresses) == 3 + 3
    for tensor in (module.weight.grad, module.bias.grad):
        assert tensor.data_ptr() not in client.addresses
    for statistic in saved[-2:]:
        assert (statistic.data_ptr() in client.addresses) == isinstance(client._transport, LocalTransport)


def test_backward_twice_and_checkpoints(one):
    _, module, shape = pair(one, "layer norm")
    x = random(*shape).requires_grad_()
    y = module(x)
    first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(first, third)


@pytest.mark.parametrize("of", ["dy", "x", "weight"])
def test_second_derivatives_are_refused(one, of):
    """Also where only x or a parameter leads back, which is easily left out without a word."""
    _, module, shape = pair(one, "layer norm")
    x = random(*shape).requires_grad_()
    module.requires_grad_(of == "weight")
    y = module(x)
    loss = y.square().sum() if of == "dy" else y.sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="the service computes no second derivatives"):
        (loss + dx.square().sum()).backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_derivatives_are_refused(one):
    _, module, shape = pair(one, "layer norm")
    module.requires_grad_(False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        module(forward_ad.make_dual(random(*shape), random(*shape)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_have_the_right_results(one):
    reference, module, shape = pair(one, "group norm")
    compiled = torch.compile(nn.Sequential(nn.Tanh(), module, nn.Tanh()), backend="aot_eager")
    x = random(*shape)
    expected = passes(nn.Sequential(nn.Tanh(), reference, nn.Tanh()), x)
    for _ in range(2):
        assert_same(passes(compiled, x), expected)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_autocast_is_torchs(one, kind, monkeypatch):
    _, module, shape = pair(one, kind)
    x = random(*shape, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
        # As on CUDA, whose autocast there is not without a device.
        monkeypatch.setattr(remote.differentiable, "_AUTOCASTING", "cpu")
        results = passes(module, x)
    assert results[0].dtype == torch.float32
    expected = passes(module, x.float())
    assert_same(results, (expected[0], expected[1].bfloat16(), *expected[2:]))
