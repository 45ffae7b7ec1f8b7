"""Modules that normalise in the service: what is settled before anything is sent, and what an answer may do."""

import sys
from inspect import signature

import fusednorm
import numpy as np
import pytest
import torch
from normserve.client import AsyncClient, Client, OverloadedError, ServerFailureError, UnexpectedAnswerError
from normserve.client import torch as remote
from normserve.client.results import BackwardResult, ForwardResult, Timing
from normserve.client.torch import differentiable
from normserve.codec.api_names import ACTIVATIONS
from torch import nn

from .harness.fake_server import FakeServer, problem_answer, tensors_answer

KINDS = {
    "layer norm": ("LayerNorm", (6,), {}),
    "layer norm of two axes": ("LayerNorm", ((4, 8),), {"eps": 1e-3}),
    "layer norm without bias": ("LayerNorm", (6,), {"bias": False}),
    "layer norm without parameters": ("LayerNorm", (6,), {"elementwise_affine": False}),
    "RMS norm": ("RMSNorm", (6,), {}),
    "RMS norm with eps": ("RMSNorm", (6,), {"eps": 1e-3}),
    "group norm": ("GroupNorm", (3, 6), {}),
    "group norm without parameters": ("GroupNorm", (3, 6), {"affine": False}),
}
X = torch.arange(12.0).view(2, 6)


@pytest.fixture
def client(connect):
    return connect(FakeServer())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", [nn, fusednorm])
def test_state_dicts_fit_both_ways(client, kind, library):
    name, arguments, options = KINDS[kind]
    theirs = getattr(library, name)(*arguments, **options)
    ours = getattr(remote, name)(*arguments, **options, client=client)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for source, sink in ((theirs, ours), (ours, theirs)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        sink.load_state_dict(source.state_dict())
        assert all(map(torch.equal, sink.state_dict().values(), source.state_dict().values()))


def test_none_is_no_activation(client):
    named, none = (remote.GroupNorm(3, 6, activation=each, client=client) for each in ("none", None))
    assert none.activation == named.activation
    assert repr(none) == repr(named)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_begin_as_torchs(client, kind):
    name, arguments, options = KINDS[kind]
    theirs = getattr(nn, name)(*arguments, **options, dtype=torch.bfloat16)
    ours = getattr(remote, name)(*arguments, **options, dtype=torch.bfloat16, client=client)
    for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "GroupNorm"])
@pytest.mark.parametrize("package", [remote, fusednorm])
def test_the_input_has_the_name_that_it_has_in_torch(package, kind):
    of_torch, ours = (list(signature(getattr(each, kind).forward).parameters)[:2] for each in (nn, package))
    assert ours == of_torch


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("layer norm", (3, 5), r"x must end in normalized_shape \[6\], of at least one axis, got \[3, 5\]"),
        ("layer norm without parameters", (3, 5), "x must end in normalized_shape"),
        ("layer norm of two axes", (3, 8, 4), r"must end in normalized_shape \[4, 8\]"),
        ("layer norm of two axes", (32,), "must end in normalized_shape"),
        ("RMS norm", (), "must end in normalized_shape"),
    ],
)
def test_x_of_other_axes_is_refused(connect, kind, shape, message):
    server = FakeServer()
    name, arguments, options = KINDS[kind]
    module = getattr(remote, name)(*arguments, **options, client=connect(server))
    with pytest.raises(ValueError, match=message):
        module(torch.zeros(shape))
    assert not server.requests


@pytest.mark.parametrize("name", ["x", "scale", "shift"])
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.zeros((2, 6), np.float32), r"ndarray: torch\.from_dlpack\({}\) makes one"),
        ([[0.0] * 6] * 2, r"list: torch\.tensor\({}, dtype=torch\.float32\) makes one"),
        ("zeros", "str"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("LayerNorm", {}), ("LayerNorm", {"layout": "nchw"}), ("RMSNorm", {}), ("GroupNorm", {})],
)
def test_inputs_that_are_no_tensors_are_refused(connect, kind, options, value, got, name):
    server = FakeServer()
    sizes = (3, 6) if kind == "GroupNorm" else (6,)
    module = getattr(remote, kind)(*sizes, client=connect(server), **options)
    inputs = (value,) if name == "x" else (X, *[value if each == name else None for each in ("scale", "shift")])
    optional = "" if name == "x" else " or None"
    with pytest.raises(TypeError, match=f"^{name} must be a torch tensor{optional}, got {got.format(name)}$"):
        module(*inputs)
    assert not server.requests


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "GroupNorm"])
def test_an_input_is_required(client, kind):
    module = getattr(remote, kind)(*((3, 6) if kind == "GroupNorm" else (6,)), client=client)
    with pytest.raises(TypeError, match=r"^x must be a torch tensor, got NoneType$"):
        module(None)


def test_parameters_of_other_axes_are_refused(client):
    module = remote.LayerNorm((4, 8), client=client)
    module.weight = nn.Parameter(torch.ones(8, 4))
    with pytest.raises(ValueError, match=r"weight must be \[4, 8\], got \[8, 4\]"):
        module(torch.zeros(4, 8))


@pytest.mark.parametrize("arguments", [{"weight_offset": 0.5}, {"weight_offset": 1, "elementwise_affine": False}])
@pytest.mark.parametrize("kind", [remote.LayerNorm, remote.RMSNorm])
def test_offsets_without_meaning_are_refused(client, kind, arguments):
    with pytest.raises(ValueError, match="weight_offset"):
        kind(4, client=client, **arguments)


@pytest.mark.parametrize(
    "arguments", [{"negative_slope": 0.5}, {"activation": "leaky_relu", "negative_slope": float("inf")}]
)
@pytest.mark.parametrize("kind", [remote.LayerNorm, remote.RMSNorm])
def test_slopes_without_meaning_are_refused(client, kind, arguments):
    with pytest.raises(ValueError, match="negative_slope"):
        kind(4, client=client, **arguments)


@pytest.mark.parametrize("client", [None, "http://127.0.0.1:1", AsyncClient])
def test_only_a_blocking_client_will_do(client):
    with pytest.raises(TypeError, match=r"client must be a normserve\.client\.Client, got"):
        remote.RMSNorm(4, client=client)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_is_refused(client):
    with (
        pytest.warns(DeprecationWarning, match="jit"),
        pytest.raises(RuntimeError, match="cannot record a call of the service"),
    ):
        torch.jit.trace(remote.LayerNorm(6, client=client), X)


def test_the_compiler_is_not_loaded_for_a_call(client, monkeypatch):
    """Which takes seconds."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(differentiable, "_untraced", None)
    monkeypatch.setattr(torch.compiler, "disable", None)
    with torch.no_grad():
        assert torch.equal(remote.LayerNorm(6, client=client)(X), X)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem_answer(429, "overloaded"), OverloadedError),
        (problem_answer(500, "internal"), ServerFailureError),
        (tensors_answer(y=np.zeros((2, 5), np.float32)), UnexpectedAnswerError),
    ],
)
def test_failures_of_either_pass_are_the_clients(connect, answer, error):
    statistics = {"mean": np.zeros(2, np.float32), "rstd": np.ones(2, np.float32)}
    client = connect(FakeServer(tensors_answer(y=X.numpy(), **statistics), answer), tries=1)
    module = remote.LayerNorm(6, client=client)
    y = module(X)
    with pytest.raises(error):
        y.sum().backward()
    with pytest.raises(error):
        module(X)
    assert module.weight.grad is None


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "GroupNorm"])
@pytest.mark.parametrize("package", [remote, fusednorm])
def test_an_activation_that_nobody_knows_is_refused_where_it_is_given(client, package, kind):
    more = {"client": client} if package is remote else {}
    sizes = (3, 6) if kind == "GroupNorm" else (6,)
    with pytest.raises(ValueError, match=f"activation must be one of {', '.join(ACTIVATIONS)}, got 'swish'"):
        getattr(package, kind)(*sizes, activation="swish", **more)


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda = True


class Answering(Client):
    """A client without a server that keeps what it was asked for."""

    def __init__(self):
        self._transport = None
        self.asked = []

    def layer_norm(self, x, weight, bias, *, stats, **options):
        self.asked.append(stats)
        each = torch.zeros(x.shape[:-1]) if stats else None
        return ForwardResult(x.detach().clone(), None, each, each, Timing())

    def layer_norm_backward(self, dy, x, weight, bias, mean, rstd, **options):
        self.asked.append((mean is not None, rstd is not None))
        return BackwardResult(dy.clone(), weight.clone(), weight.clone(), None, None, Timing())


@pytest.mark.parametrize(("rows", "is_on_gpu"), [(4, False), (4, True), (2**18 // 6 + 1, True)])
def test_statistics_of_a_small_x_on_a_gpu_are_computed_again(rows, is_on_gpu):
    client = Answering()
    module = remote.LayerNorm(6, client=client)
    x = torch.ones(rows, 6).as_subclass(OnGpu if is_on_gpu else torch.Tensor).requires_grad_()
    with torch.no_grad():
        module(x)
    module(x).backward(torch.ones(rows, 6))
    is_kept = not is_on_gpu or rows > 4
    assert client.asked == [None, True if is_kept else None, (is_kept, is_kept)]
    assert x.grad.shape == x.shape


class AnsweringParts(Answering):
    """A client whose results are parts of what it received."""

    def layer_norm(self, x, *parameters, stats, **options):
        each = torch.zeros(x.shape[:-1]) if stats else None
        return ForwardResult(part(x), None, each, each, Timing())

    def layer_norm_backward(self, dy, x, weight, *others, **options):
        return BackwardResult(part(dy), part(weight), part(weight), None, None, Timing())


def part(tensor):
    return torch.stack((tensor, tensor))[0]


def test_results_and_gradients_may_be_changed_in_place():
    module = remote.LayerNorm(6, client=AnsweringParts())
    x = torch.ones(4, 6, requires_grad=True)
    y = module(x).add_(1).relu_()
    for gradient in torch.autograd.grad(y.sum(), (x, module.weight, module.bias), create_graph=True):
        assert gradient.mul_(2).requires_grad
