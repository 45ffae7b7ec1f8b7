"""InstanceNorm beside torch's: the function, and the modules that inherit torch's.

On a GPU they run on the kernels, for which there is no float64.
"""

import inspect
import io
from itertools import product

import fusednorm
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.arguments.checks import ACTIVATIONS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.harness.activations import TORCH_ACTIVATIONS
from tests.sampling import mark_rest_slow

PAIRS = {
    1: (nn.InstanceNorm1d, fusednorm.InstanceNorm1d, (2, 6, 7)),
    2: (nn.InstanceNorm2d, fusednorm.InstanceNorm2d, (2, 6, 5, 4)),
    3: (nn.InstanceNorm3d, fusednorm.InstanceNorm3d, (2, 6, 3, 5, 4)),
}
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
    torch.bfloat16: {"rtol": 6e-2, "atol": 6e-2},
}


def lay(x, last):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def make_pair(axes, **options):
    """A module of torch and one of this library, with the same random parameters."""
    theirs, ours, shape = PAIRS[axes]
    torch_module, module = theirs(shape[1], **options), ours(shape[1], **options)
    for parameter in torch_module.parameters():
        nn.init.normal_(parameter)
    module.load_state_dict(torch_module.state_dict())
    return torch_module, module, shape


@pytest.mark.parametrize(
    ("axes", "affine", "last", "dtype"), mark_rest_slow(product(PAIRS, [False, True], [False, True], TOLERANCES))
)
def test_results_and_gradients_are_torchs(axes, affine, last, dtype, device):
    options = {"dtype": dtype, "device": "cpu" if dtype == torch.float64 else device}
    torch_module, module, shape = make_pair(axes, affine=affine, **options)
    x = lay(torch.randn(shape, **options) * 2 + 1, last)
    dy = lay(torch.randn_like(x), last)
    found = []
    for each in (module, torch_module):
        leaf = x.detach().requires_grad_()
        y = each(leaf)
        found.append((y, *torch.autograd.grad(y, [leaf, *each.parameters()], dy)))
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, **TOLERANCES[dtype])
    assert found[0][0].stride() == x.stride()
    with torch.no_grad():
        torch.testing.assert_close(module(x), found[0][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes", PAIRS)
def test_modules_are_drop_ins(axes):
    for options in ({}, {"affine": True}, {"track_running_stats": True, "momentum": None}):
        torch_module, module, shape = make_pair(axes, **options)
        assert repr(module) == repr(torch_module)
        assert isinstance(module, type(torch_module))
        unbatched = torch.randn(shape[1:])
        torch.testing.assert_close(module(unbatched), torch_module(unbatched))
        torch.testing.assert_close(module(input=unbatched), torch_module(input=unbatched))


@pytest.mark.parametrize("axes", PAIRS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_follows_the_norm(axes, activation, device):
    slope = {"negative_slope": 0.25} if activation == "leaky_relu" else {}
    _, plain, shape = make_pair(axes, affine=True, device=device)
    for tracking in (False, True):
        module = PAIRS[axes][1](shape[1], affine=True, activation=activation, track_running_stats=tracking, **slope)
        module.to(device).load_state_dict(plain.state_dict(), strict=False)
        x = torch.randn(shape, device=device)
        y = F.leaky_relu(plain(x), 0.25) if slope else TORCH_ACTIVATIONS[activation](plain(x))
        torch.testing.assert_close(module(x), y)
    assert (activation == "none") or f"activation='{activation}'" in repr(module)


@pytest.mark.parametrize("axes", PAIRS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_torchs(axes, momentum):
    torch_module, module, shape = make_pair(axes, affine=True, track_running_stats=True, momentum=momentum)
    for training in (True, True, False, True, False):
        x = torch.randn(shape) * 3 + 2
        got, want = (each.train(training)(x) for each in (module, torch_module))
        assert torch.equal(got, want)
        for one, other in zip(module.buffers(), torch_module.buffers(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("axes", PAIRS)
@pytest.mark.parametrize("training", [True, False])
def test_one_value_for_each_channel_is_torchs_error(axes, training):
    torch_module, module, shape = make_pair(axes)
    x = torch.randn(2, shape[1], *[1] * axes)
    errors = []
    for each in (torch_module, module):
        with pytest.raises(ValueError, match="more than 1 spatial element") as error:
            each.train(training)(x)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("axes", PAIRS)
def test_wrong_shapes_are_torchs_errors_and_warnings(axes):
    _, module, shape = make_pair(axes, affine=True)
    with pytest.raises(ValueError, match=r"expected .*D input"):
        module(torch.randn(2, *shape, 2))
    with pytest.raises(ValueError, match="to match num_features"):
        module(torch.randn(2, 5, *shape[2:]))
    _, module, _ = make_pair(axes)
    with pytest.warns(UserWarning, match="does not match num_features"):
        y = module(x := torch.randn(2, 5, *shape[2:]))
    torch.testing.assert_close(y, F.instance_norm(x))


@pytest.mark.parametrize("axes", PAIRS)
def test_no_sample_is_no_error(axes):
    _, module, shape = make_pair(axes)
    assert module(torch.randn(0, *shape[1:])).shape == (0, *shape[1:])


@pytest.mark.skipif(
    "bias" not in inspect.signature(torch.nn.InstanceNorm2d).parameters, reason="this torch has no such argument"
)
def test_a_module_without_bias():
    theirs, ours = (kind(6, affine=True, bias=False) for kind in PAIRS[2][:2])
    assert ours.bias is None
    assert [*ours.state_dict()] == [*theirs.state_dict()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axes", PAIRS)
def test_autocast_gives_the_dtype_of_torchs_module(axes, dtype):
    torch_module, module, shape = make_pair(axes, affine=True)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(shape, dtype=dtype)
        assert module(x).dtype == torch_module(x).dtype
    torch.set_autocast_enabled("cuda", True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(shape, dtype=dtype, device="cuda")
        got, want = (kind(shape[1], affine=True, device="cuda")(x) for kind in PAIRS[axes][1::-1])
    torch.set_autocast_enabled("cuda", False)
    assert got.dtype == want.dtype == dtype


@pytest.mark.parametrize(
    "options", [{}, {"affine": True, "activation": "leaky_relu"}, {"track_running_stats": True}]
)
@pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated:DeprecationWarning")
def test_scripted_modules_compute_and_are_saved(options):
    module = fusednorm.InstanceNorm2d(6, **options)
    x = torch.randn(2, 6, 5, 4, requires_grad=True)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    for each in (torch.jit.script(module), scripted):
        torch.testing.assert_close(each(x), module(x))
        got, want = (torch.autograd.grad(kind(x).sin().sum(), x) for kind in (each, module))
        torch.testing.assert_close(got, want)
    with pytest.raises((RuntimeError, torch.jit.Error), match="more than 1 spatial element"):
        torch.jit.script(fusednorm.InstanceNorm2d(6))(x[..., :1, :1])


def test_torch_compile_has_no_graph_break(device):
    module = fusednorm.InstanceNorm3d(6, affine=True, activation="leaky_relu", negative_slope=0.25, device=device)
    x = torch.randn(2, 6, 3, 5, 4, device=device, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(x)
    results = [torch.autograd.grad(run(x), [x, *module.parameters()], dy) for run in (module, compiled)]
    torch.testing.assert_close(*results)


def test_the_function_has_all_options_of_group_norm(device):
    x = torch.randn(2, 6, 5, 4, device=device)
    weight, bias = torch.randn(2, 6, device=device)
    scale, shift = torch.randn(2, 2, 6, device=device)
    options = {"scale": scale, "shift": shift, "activation": "leaky_relu", "negative_slope": 0.25}
    options |= {"dropout": 0.3, "seed": 7}
    y = fusednorm.instance_norm(x, weight, bias, 1e-3, **options)
    assert torch.equal(y, fusednorm.group_norm(x, 6, weight, bias, 1e-3, **options))
    z = F.instance_norm(x, weight=weight, bias=bias, eps=1e-3) * (1 + scale[..., None, None])
    want = F.leaky_relu(z + shift[..., None, None], 0.25) / 0.7
    torch.testing.assert_close(y, want.where(y != 0, 0.0))
    assert 0 < (y == 0).float().mean() < 0.6


@pytest.mark.parametrize("shape", [(), (6,)])
def test_the_function_refuses_an_x_without_channels(shape):
    with pytest.raises(fusednorm.KernelInputError, match=r"x must be \[N, C, \*spatial\]"):
        fusednorm.instance_norm(torch.randn(shape))


@pytest.mark.parametrize("last", [False, True])
def test_kernels_compute_one_channel_a_group(last, device):
    x = lay(torch.randn(2, 8, 6, 10, device=device), last)
    weight, bias = torch.randn(2, 8, device=device)
    statistics = fusednorm.group_norm_forward(x, 8, weight, bias, stats=True, activation="leaky_relu")
    want = F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias))
    torch.testing.assert_close(statistics.y, want, rtol=1e-4, atol=1e-5)
