"""A norm and the activation behind it are one pass where the code of the module around them says so."""

import copy
import pickle
from functools import partial

import fusednorm
import pytest
import torch
from torch import nn

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import (
    LayerNorm2d,
    LlamaRMSNorm,
    ResnetBlock2D,
    add_hook,
    remove_hook,
    timm_group_norm,
    varied,
)

ACTIVATIONS = {
    "silu": nn.SiLU(),
    "silu, in place": nn.SiLU(inplace=True),
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class Calls(Dispatched):
    """Notes the activations that the library's operators fuse, and torch's own that are dispatched."""

    def __init__(self):
        super().__init__()
        self.fused, self.separate = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusednorm" and not function.name().endswith("backward"):
            self.fused.append(args[9])
        elif function.name().split("::")[1].rstrip("_") in ("silu", "relu", "leaky_relu", "gelu"):
            self.separate.append(function.name())
        return super().__torch_dispatch__(function, types, args, kwargs)


def calls(module, *inputs):
    with Calls() as seen, torch.no_grad():
        module(*inputs)
    return seen


@pytest.fixture(autouse=True)
def precise_convolutions(monkeypatch):
    """A GPU's would round norms that differ by a bit to different numbers."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def x(device):
    return torch.randn(2, 4, 3, 5, device=device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_a_sequence_both_are_one_pass(activation, x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), copy.deepcopy(ACTIVATIONS[activation]), nn.Conv2d(4, 4, 1)))
    net = net.to(x.device)
    want = net(x)
    name = activation.split(",")[0]
    assert fusednorm.patch(net).patched == {"0": "group_norm", "": f"group_norm with {name} in a Sequential"}
    torch.testing.assert_close(net(x), want, **TOLERANCE)
    seen = calls(net, x)
    assert (seen.fused, seen.separate) == ([name], [])


NORMS = {
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer_norm": lambda: nn.LayerNorm(5),
    "layer_norm of two axes": lambda: nn.LayerNorm((3, 5)),
    "layer_norm over channels": lambda: LayerNorm2d(4),
    "rms_norm": lambda: nn.RMSNorm(5),
    "rms_norm of Llama": lambda: LlamaRMSNorm(5),
    "group_norm of timm": lambda: timm_group_norm()(4, num_groups=2),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_one_pass_with_its_activation(name, x):
    net = varied(nn.Sequential(NORMS[name](), nn.LeakyReLU(0.3), nn.Conv2d(4, 4, 1))).to(x.device)
    patched = copy.deepcopy(net)
    operation = name.split()[0]
    assert fusednorm.patch(patched).patched[""] == f"{operation} with leaky_relu in a Sequential"
    seen = calls(patched, x)
    assert (seen.fused, seen.separate) == (["leaky_relu"], [])
    wide = x.requires_grad_()
    want, got = net(wide), patched(wide)
    torch.testing.assert_close(got, want, **TOLERANCE)
    for each in (want, got):
        each.square().sum().backward()
    for one, other in zip(net.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3)


def test_an_activation_with_another_slope_is_computed_as_it_is(x):
    net = varied(nn.Sequential(nn.InstanceNorm2d(4), nn.LeakyReLU())).to(x.device)
    fusednorm.patch(net)
    net[1].negative_slope = 0.5
    torch.testing.assert_close(net(x), nn.functional.leaky_relu(net[0](x), 0.5), **TOLERANCE)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm of Llama", "instance_norm"])
def test_compilers_get_the_norms_that_they_fuse_themselves(norm, x):
    net = varied(nn.Sequential(NORMS[norm](), nn.GELU())).to(x.device)
    want = net(x)
    fusednorm.patch(net)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(net, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    torch.testing.assert_close(compiled(x), want, **TOLERANCE)
    assert ("fusednorm" in graphs[0].code) == (norm == "instance_norm")


def test_gradients_of_a_sequence(x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 1))).to(x.device)
    patched = copy.deepcopy(net)
    fusednorm.patch(patched)
    for each in (net, patched):
        each(x).square().sum().backward()
    for want, got in zip(net.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, **TOLERANCE)


def test_who_calls_the_parts_gets_the_parts(x):
    """As code does that takes a sequence for a list, or the activation of one for others."""
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())).to(x.device)
    alone = net[0](x)
    fusednorm.patch(net)
    torch.testing.assert_close(net[0](x), alone, **TOLERANCE)
    torch.testing.assert_close(net[:1](x), alone, **TOLERANCE)
    assert torch.equal(net[1](x), nn.functional.silu(x))


def test_whoever_watches_a_part_sees_what_it_returns(x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())).to(x.device)
    alone, want = net[0](x), net(x)
    fusednorm.patch(net)
    seen = []
    handle = net[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(net(x), want, **TOLERANCE)
    torch.testing.assert_close(seen, [alone], **TOLERANCE)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    net(x)
    assert seen[1:] == [nn.GroupNorm, nn.SiLU, nn.Sequential]
    handle.remove()
    assert calls(net, x).fused == ["silu"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_with_a_hook_of_accelerate_is_called_alone(place, x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())).to(x.device)
    fusednorm.patch(net)
    add_hook(net[place], shift=1.0)
    torch.testing.assert_close(net(x), net[1](net[0](x)), **TOLERANCE)
    assert calls(net, x).fused == ["none"]
    remove_hook(net[place])
    assert calls(net, x).fused == ["silu"]


def test_a_sequence_that_changes_is_computed_as_it_is(x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.GroupNorm(2, 4), nn.ReLU())).to(x.device)
    fusednorm.patch(net)
    net[1] = nn.Sigmoid()
    net.append(nn.Tanh())
    fusednorm.unpatch(net[2])
    want_of = copy.deepcopy(net)
    fusednorm.unpatch(want_of)
    torch.testing.assert_close(net(x), want_of(x), **TOLERANCE)
    assert calls(net, x).fused == ["none"]


def test_what_kernels_do_not_take_goes_through_one_by_one(x):
    net = varied(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())).to(x.device)
    fusednorm.patch(net)
    want_of = copy.deepcopy(net)
    fusednorm.unpatch(want_of)
    assert torch.equal(net.double()(x.double()), want_of.double()(x.double()))
    assert net.float()(x[:, :, :0]).shape == (2, 4, 0, 5)
    with pytest.raises(TypeError):
        net(x, x)
    torch.testing.assert_close(net(input=x), want_of.float()(x), **TOLERANCE)
    assert fusednorm.patch(nn.Sequential()).patched == {}


@pytest.mark.parametrize("embedding", ["default", "scale_shift"])
@pytest.mark.parametrize("same_channels", [False, True])
def test_residual_blocks(embedding, same_channels, x):
    block = varied(ResnetBlock2D(out=4 if same_channels else 6, embedding=embedding)).to(x.device)
    temb = torch.randn(2, 5, device=x.device)
    want = block(x, temb)
    state = torch.get_rng_state()
    assert fusednorm.patch(block).patched == {
        "norm1": "group_norm",
        "norm2": "group_norm",
        "": "twice group_norm with silu in a ResnetBlock2D",
    }
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(block(x, temb), want, **TOLERANCE)
    seen = calls(block, x, temb)
    # That of the embedding is left.
    assert (seen.fused, len(seen.separate)) == (["silu", "silu"], 1)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        torch.testing.assert_close(copied(x, temb), want, **TOLERANCE)
        assert copied.norm1.weight is not block.norm1.weight
    fusednorm.unpatch(block)
    assert torch.equal(block(x, temb), want)


def test_residual_blocks_without_an_embedding_or_with_hooks(x):
    block = varied(ResnetBlock2D(temb=None)).to(x.device)
    want = block(x, None)
    fusednorm.patch(block)
    torch.testing.assert_close(block(x, None), want, **TOLERANCE)
    torch.testing.assert_close(block(x, temb=None), want, **TOLERANCE)
    assert calls(block, x, None).fused == ["silu", "silu"]
    seen = []
    block.norm2.register_forward_hook(lambda *_: seen.append("norm2"))
    torch.testing.assert_close(block(x, None), want, **TOLERANCE)
    assert seen == ["norm2"]


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_residual_blocks_compile_whole(backend, x):
    block = varied(ResnetBlock2D(embedding="scale_shift")).to(x.device)
    temb = torch.randn(2, 5, device=x.device)
    want = block(x, temb)
    fusednorm.patch(block)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, temb), want, **TOLERANCE)
    program = torch.export.export(block, (x, temb))
    torch.testing.assert_close(program.module()(x, temb), want, **TOLERANCE)


class StrictSampling(nn.Module):
    """Samples x of its own number of channels alone, as diffusers' Upsample2D and Downsample2D do."""

    def __init__(self, factor):
        super().__init__()
        self.channels, self.factor = 4, factor

    def forward(self, x):
        assert x.shape[1] == self.channels
        return nn.functional.interpolate(x, scale_factor=self.factor)


@pytest.mark.parametrize("name", ["upsample", "downsample"])
@pytest.mark.parametrize("is_module", [False, True])
def test_residual_blocks_that_sample(is_module, name, x):
    sample = StrictSampling(2.0 if name == "upsample" else 0.5)
    block = varied(ResnetBlock2D()).to(x.device)
    # It may be a function.
    delattr(block, name)
    setattr(block, name, sample if is_module else partial(sample.forward))
    patched, temb = copy.deepcopy(block), torch.randn(2, 5, device=x.device)
    assert fusednorm.patch(patched).patched[""] == "twice group_norm with silu in a ResnetBlock2D"
    assert calls(patched, x, temb).fused == ["silu", "silu"]
    want, got = block(x, temb), patched(x, temb)
    torch.testing.assert_close(got, want, **TOLERANCE)
    for each in (want, got):
        each.square().sum().backward()
    for one, other in zip(block.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3)


def otherwise():
    class Later(ResnetBlock2D):
        def forward(self, input_tensor, temb):
            return super().forward(input_tensor, temb) + 1

    Later.__name__ = "ResnetBlock2D"
    return Later()


def raising():
    class Later(ResnetBlock2D):
        def forward(self, input_tensor, temb, mask):
            return super().forward(input_tensor, temb) * mask

    Later.__name__ = "ResnetBlock2D"
    return Later()


LEFT_ALONE = {
    "otherwise": (otherwise, "a small one of its kind computes something else"),
    "raising": (raising, "a small one of its kind raised TypeError"),
    "activation": (
        lambda: ResnetBlock2D(activation=nn.Mish()),
        "its norms and nonlinearity are not GroupNorms and an activation to be taken as one",
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_blocks_that_are_left_alone(case):
    make, reason = LEFT_ALONE[case]
    block = make()
    report = fusednorm.patch(block)
    assert report.patched == {"norm1": "group_norm", "norm2": "group_norm"}
    assert report.skipped == {"": reason}
