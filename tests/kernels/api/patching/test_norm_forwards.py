"""What torch does with modules, it does with patched ones: copies, hooks, compilers, checkpoints."""

import copy
import io
import pickle
import re

import fusednorm
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import GemmaRMSNorm, Mixed, varied

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


INSTANCE_NORMS = {
    "1d": (nn.InstanceNorm1d, (2, 4, 7)),
    "2d": (nn.InstanceNorm2d, (2, 4, 3, 5)),
    "2d, channels-last": (nn.InstanceNorm2d, (2, 4, 3, 5)),
    "2d, no batch": (nn.InstanceNorm2d, (4, 3, 5)),
    "3d": (nn.InstanceNorm3d, (2, 4, 3, 2, 5)),
    "3d, channels-last": (nn.InstanceNorm3d, (2, 4, 3, 2, 5)),
    "3d, no batch": (nn.InstanceNorm3d, (4, 3, 2, 5)),
}


def operators(module, *inputs):
    with Dispatched() as seen:
        module(*inputs)
    return seen.names


@pytest.mark.parametrize("case", INSTANCE_NORMS)
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norms_are_those_of_torch(affine, case, device):
    kind, shape = INSTANCE_NORMS[case]
    x = torch.randn(shape, device=device)
    if "last" in case:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    norm = varied(kind(4, affine=affine)).to(device)
    patched = copy.deepcopy(norm)
    assert fusednorm.patch(patched).patched == {"": "instance_norm"}
    want, got = norm(x), patched(x)
    torch.testing.assert_close(got, want, **TOLERANCE)
    weight = torch.randn_like(want)
    parameters = x, *norm.parameters()
    wanted = torch.autograd.grad((want * weight).sum(), parameters)
    gradients = torch.autograd.grad((got * weight).sum(), (x, *patched.parameters()))
    torch.testing.assert_close(gradients, wanted, **TOLERANCE)
    assert operators(patched, x) == ["fusednorm::group_norm"]
    assert got.stride() == x.stride()


@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (2, 4, 7), (2, 4), (2, 3, 5, 5)])
def test_an_instance_norm_raises_the_errors_of_torch(shape, device):
    norm = nn.InstanceNorm2d(4, affine=True, device=device)
    x = torch.randn(shape, device=device)
    if shape == (2, 4, 7):
        norm = nn.InstanceNorm3d(4, device=device)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        norm(x)
    fusednorm.patch(norm)
    with pytest.raises(ValueError, match=re.escape(str(error.value))):
        norm(x)


def test_an_instance_norm_warns_of_other_channels_as_torch_does(device):
    norm = nn.InstanceNorm2d(4)
    x = torch.randn(2, 3, 5, 5, device=device)
    fusednorm.patch(norm)
    with pytest.warns(UserWarning, match="does not match num_features"):
        assert norm(x).shape == x.shape


def test_an_instance_norm_keeps_the_dtype_of_x_under_autocast(device):
    norm = varied(nn.InstanceNorm2d(4, affine=True)).to(device)
    x = torch.randn(2, 4, 5, 5, device=device, dtype=torch.bfloat16)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        want = norm(x)
        fusednorm.patch(norm)
        got = norm(x)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_lazy_instance_norm_is_patched_once_it_has_parameters(device):
    norm = nn.LazyInstanceNorm3d(track_running_stats=False)
    x = torch.randn(2, 4, 3, 2, 5, device=device)
    want = norm.to(device)(x)
    assert fusednorm.patch(norm).patched == {"": "instance_norm"}
    torch.testing.assert_close(norm(x), want, **TOLERANCE)


@pytest.fixture
def model(device):
    model = Mixed().to(device)
    fusednorm.patch(model)
    return model


@pytest.fixture
def x(device):
    return torch.randn(2, 4, 8, device=device)


def few():
    """Of each kind of forward one, for what takes long."""
    norms = nn.LayerNorm(8), GemmaRMSNorm(8), nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm1d(4, affine=True)
    return varied(nn.Sequential(*norms))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
def test_a_copy_is_patched_and_has_its_own_parameters(copied, model, x):
    want = model(x)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(x), want)
    for module, original in zip(other.modules(), model.modules(), strict=True):
        if "forward" in vars(module):
            assert module.forward.module is module
            assert original.forward.module is original
    other(x).sum().backward()
    assert model.first.weight.grad is None
    assert other.first.weight.grad is not None
    fusednorm.unpatch(other)
    torch.testing.assert_close(other(x), want, **TOLERANCE)
    assert "forward" in vars(model.first)


def test_a_state_dict_goes_round(model, x):
    fresh = Mixed().to(x.device)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), model(x), **TOLERANCE)
    other = Mixed().to(x.device)
    fusednorm.patch(other)
    other.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(other(x), model(x))


def test_parameters_that_replace_others_are_seen(model, x):
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    zeros["net.2.weight"] = model.net[2].weight
    fusednorm.unpatch(want_of := copy.deepcopy(model))
    torch.testing.assert_close(functional_call(model, zeros, (x,)), functional_call(want_of, zeros, (x,)))
    model.first.weight = nn.Parameter(torch.full_like(model.first.weight, 3.0))
    want_of.first.weight = nn.Parameter(model.first.weight.detach().clone())
    torch.testing.assert_close(model(x), want_of(x), **TOLERANCE)


def test_hooks_of_every_kind_run(device, x):
    seen = []
    norm = nn.LayerNorm(8, device=device)
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    fusednorm.patch(norm)
    norm.register_forward_pre_hook(lambda *_: seen.append("before"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm(x.requires_grad_()).sum().backward()
    assert seen == ["before", "forward", "backward"]
    fusednorm.unpatch(norm)
    norm(x).sum().backward()
    assert seen == ["before", "forward", "backward"] * 2


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_whole(backend, x):
    model = few().to(x.device)
    fusednorm.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x.requires_grad_()
    for _ in range(2):
        want = model(x)
        torch.testing.assert_close(compiled(x), want)
        (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), x)[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def test_what_was_compiled_follows_patch_and_unpatch(x):
    ran = []

    def backend(graph, inputs):
        is_patched = any("fusednorm" in str(node.target) for node in graph.graph.nodes)

        def run(*arguments):
            ran.append(is_patched)
            return graph(*arguments)

        return run

    model = few().to(x.device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    want = compiled(x)
    for change in (fusednorm.patch, fusednorm.unpatch, fusednorm.patch):
        change(compiled)
        torch.testing.assert_close(compiled(x), want, **TOLERANCE)
    assert ran == [False, True, False, True]


def test_compilers_see_rows_as_if_nothing_were_patched(x):
    graphs = []

    def backend(graph, inputs):
        graphs.append([(node.op, str(node.target)) for node in graph.graph.nodes])
        return graph

    model = varied(nn.Sequential(nn.LayerNorm(8), GemmaRMSNorm(8), nn.RMSNorm(8))).to(x.device)
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, backend=backend, fullgraph=True)(x)
        fusednorm.patch(model)
    before, after = graphs
    assert before == after


def test_compilers_see_what_they_can_fuse(x):
    seen = set()

    def backend(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes if "fusednorm" in str(node.target))
        return graph

    model = few().to(x.device)
    fusednorm.patch(model)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert seen == {"fusednorm.group_norm"}


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_strides_that_no_kernel_takes_are_compiled(backend, device):
    norm = varied(nn.LayerNorm(8)).to(device)
    fusednorm.patch(norm)
    x = torch.randn(2, 8, 5, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: norm(x.transpose(1, 2)), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), norm(x.transpose(1, 2)))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict, model, x):
    program = torch.export.export(model, (x,), strict=strict)
    operators = {str(node.target) for node in program.graph.nodes}
    assert "aten.layer_norm.default" in operators
    assert {each for each in operators if "fusednorm" in each} == {"fusednorm.group_norm.default"}
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_norm_alone_is_exported(strict, device, x):
    norm = nn.LayerNorm(8, device=device)
    fusednorm.patch(norm)
    program = torch.export.export(norm, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), norm(x))


def test_traced_symbolically(model, x):
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x), **TOLERANCE)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant, model, x):
    x.requires_grad_()
    model(x).square().sum().backward()
    want = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close([x.grad, *(parameter.grad for parameter in model.parameters())], want)


def test_frozen_parameters_get_no_gradient(model, x):
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    model.first.bias.requires_grad_()
    model(x.detach()).sum().backward()
    assert model.first.bias.grad is not None
    assert model.first.weight.grad is None


def test_differentiated_twice(model, x):
    x.requires_grad_()

    def penalty(each):
        (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(each.parameters()), allow_unused=True)

    got = penalty(model)
    fusednorm.unpatch(model)
    torch.testing.assert_close(got, penalty(model), rtol=1e-3, atol=1e-1)


def test_a_result_may_be_changed_in_place(device):
    net = nn.Sequential(varied(nn.GroupNorm(2, 4)), nn.Identity(), nn.ReLU(inplace=True)).to(device)
    x = torch.randn(2, 4, 8, device=device, requires_grad=True)
    (want,) = torch.autograd.grad(net(x).square().sum(), x)
    fusednorm.patch(net)
    (got,) = torch.autograd.grad(net(x).square().sum(), x)
    torch.testing.assert_close(got, want, **TOLERANCE)
