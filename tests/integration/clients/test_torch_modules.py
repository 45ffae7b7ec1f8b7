"""Modules that normalise in the service: torch's results and gradients, torch's state_dict, and they train."""

import copy

import fusednorm
import pytest
import torch
from normserve.client import Client
from normserve.client import torch as remote
from torch import nn


@pytest.fixture(scope="module", params=["shared memory", "http"])
def client(request, launched, tmp_path_factory):
    path = tmp_path_factory.mktemp("modules") / "normserve.sock"
    server = launched("--local", str(path))
    with Client(f"unix://{path}" if request.param == "shared memory" else server.url) as client:
        yield client


PAIRS = {
    "layer norm": (nn.LayerNorm, "LayerNorm", (16,), {}, (3, 5, 16)),
    "two axes": (nn.LayerNorm, "LayerNorm", ((4, 8),), {}, (3, 4, 8)),
    "without bias": (nn.LayerNorm, "LayerNorm", (16,), {"bias": False}, (6, 16)),
    "without parameters": (nn.LayerNorm, "LayerNorm", (16,), {"elementwise_affine": False}, (6, 16)),
    "RMS norm": (nn.RMSNorm, "RMSNorm", (16,), {}, (2, 6, 16)),
    "RMS norm with eps": (nn.RMSNorm, "RMSNorm", (16,), {"eps": 1e-3}, (6, 16)),
    "group norm": (nn.GroupNorm, "GroupNorm", (3, 12), {}, (2, 12, 4, 5)),
    "group norm of points": (nn.GroupNorm, "GroupNorm", (3, 12), {"affine": False}, (5, 12)),
}


def pair(client, name):
    theirs, ours, arguments, options, shape = PAIRS[name]
    reference = theirs(*arguments, **options)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    module = getattr(remote, ours)(*arguments, **options, client=client)
    module.load_state_dict(reference.state_dict())
    return reference, module, shape


@pytest.mark.parametrize("name", PAIRS)
def test_results_and_gradients_are_torchs(client, name):
    reference, module, shape = pair(client, name)
    assert reference.state_dict().keys() == module.state_dict().keys()
    assert repr(module) == repr(reference)
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    dy = torch.randn(shape)
    ys = [each(x) for each, x in zip((reference, module), xs, strict=True)]
    torch.testing.assert_close(ys[1], ys[0], rtol=1e-4, atol=1e-5)
    for y in ys:
        y.backward(dy)
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-4, atol=1e-5)
    for expected, got in zip(reference.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(module(xs[1]), ys[1])


def test_channels_last_stays_so(client):
    reference, module, shape = pair(client, "group norm")
    x = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()
    y = module(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(reference(x).square().sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-3, atol=1e-4)


SMALL = {"layer norm": (2, 16), "RMS norm with eps": (2, 16), "group norm": (1, 12, 2)}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
def test_gradients_are_those_of_the_function(client, name):
    _, module, _ = pair(client, name)
    x = torch.randn(SMALL[name], generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0)


def test_an_activation_is_fused(client):
    _, module, shape = pair(client, "layer norm")
    x = torch.randn(shape)
    plain = module(x)
    module.activation = "silu"
    torch.testing.assert_close(module(x), nn.functional.silu(plain))
    assert "activation='silu'" in repr(module)


def test_x_of_other_axes_is_refused(client):
    _, module, _ = pair(client, "two axes")
    with pytest.raises(ValueError, match=r"must end in \[4, 8\]"):
        module(torch.randn(3, 8, 4))


def test_a_model_trains_as_with_the_kernels_in_its_own_process(client):
    def model(norm, **options):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 32), norm(32, **options), nn.GELU(), nn.Linear(32, 1)]
        return nn.Sequential(*layers)

    def trained(net):
        numbers = torch.Generator().manual_seed(1)
        steps = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(40):
            x = torch.randn(64, 8, generator=numbers)
            loss = (net(x) - x.prod(1, keepdim=True)).square().mean()
            steps.zero_grad()
            loss.backward()
            steps.step()
        return loss.item()

    theirs = trained(copy.deepcopy(model(remote.LayerNorm, client=client)))
    assert theirs == pytest.approx(trained(model(fusednorm.LayerNorm)), rel=1e-3)
