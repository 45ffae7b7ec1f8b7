"""Modules that normalise in a real service: torch's results and gradients, torch's state_dict, and they train."""

import copy
import io
import multiprocessing
import pickle

import fusednorm
import pytest
import torch
from normserve.client import Client, ConnectionFailedError, InvalidRequestError, RetryPolicy
from normserve.client import torch as remote
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
KINDS = {
    "layer norm": ("LayerNorm", (16,), {}, (3, 5, 16)),
    "layer norm of two axes": ("LayerNorm", ((4, 8),), {}, (3, 2, 4, 8)),
    "layer norm without bias": ("LayerNorm", (16,), {"bias": False, "eps": 1e-2}, (6, 16)),
    "layer norm without parameters": ("LayerNorm", (16,), {"elementwise_affine": False}, (6, 16)),
    "RMS norm": ("RMSNorm", (16,), {}, (2, 6, 16)),
    "RMS norm of two axes": ("RMSNorm", ((4, 8),), {"eps": 1e-2}, (3, 4, 8)),
    "RMS norm without parameters": ("RMSNorm", (16,), {"elementwise_affine": False}, (16,)),
    "group norm": ("GroupNorm", (3, 12), {}, (2, 12, 4, 5)),
    "group norm of vectors": ("GroupNorm", (3, 12), {"affine": False}, (5, 12)),
    "group norm of sequences": ("GroupNorm", (4, 12), {"eps": 1e-2}, (2, 12, 7)),
}
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
}


class Watched(Client):
    """A client that knows which calls it has made, and where the results lay."""

    calls = ()
    addresses = ()

    def _run(self, call):
        result = super()._run(call)
        self.calls = (*self.calls, call)
        tensors = [value for value in map(result.__getattribute__, result.__slots__) if torch.is_tensor(value)]
        self.addresses = (*self.addresses, *(tensor.data_ptr() for tensor in tensors))
        return result


@pytest.fixture(scope="module")
def urls(launched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    server = launched("--local", str(folder / "local.sock"), "--uds", str(folder / "http.sock"))
    return {
        "http": server.url,
        "http over a Unix socket": f"http+unix://{folder / 'http.sock'}",
        "shared memory": f"unix://{folder / 'local.sock'}",
    }


@pytest.fixture(params=["http", "http over a Unix socket", "shared memory"])
def client(request, urls):
    with Watched(urls[request.param], retries=RetryPolicy(tries=1)) as client:
        yield client


@pytest.fixture
def one(urls):
    """A client of one kind, for what is the same with all."""
    with Watched(urls["shared memory"], retries=RetryPolicy(tries=1)) as client:
        yield client


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(client, kind, dtype=torch.float32, **more):
    """The kernel library's module, the service's with its parameters, and the shape of an x."""
    name, arguments, options, shape = KINDS[kind]
    reference = getattr(fusednorm, name)(*arguments, **options, **more, dtype=dtype)
    for seed, parameter in enumerate(reference.parameters()):
        parameter.data = random(*parameter.shape, seed=seed + 10, dtype=dtype)
    module = getattr(remote, name)(*arguments, **options, **more, dtype=dtype, client=client)
    module.load_state_dict(reference.state_dict())
    return reference, module, shape


def passes(module, x, *more, dy=None):
    """y, and the gradients of x, of what else went in, and of the parameters."""
    inputs = [x.detach().requires_grad_(), *(tensor.detach().requires_grad_() for tensor in more)]
    y = module(*inputs)
    dy = random(*y.shape, seed=7, dtype=y.dtype) if dy is None else dy
    gradients = torch.autograd.grad(y, [*inputs, *module.parameters()], dy)
    return y.detach(), *gradients


def assert_same(got, expected, dtype=torch.float32):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **TOLERANCES[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_kernel_library(client, kind):
    reference, module, shape = pair(client, kind)
    x = random(*shape)
    assert_same(passes(module, x), passes(reference, x))
    assert [call.path.endswith("/backward") for call in client.calls] == [False, True]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_every_element_type(one, kind, dtype):
    reference, module, shape = pair(one, kind, dtype)
    x = random(*shape, dtype=dtype)
    assert_same(passes(module, x), passes(reference, x), dtype)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_parameters_of_another_type_than_x(one, kind):
    reference, module, shape = pair(one, kind)
    x = random(*shape, dtype=torch.bfloat16)
    assert_same(passes(module, x), passes(reference, x), torch.bfloat16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_activations(one, kind, activation):
    reference, module, shape = pair(one, kind, activation=activation)
    x = random(*shape)
    assert_same(passes(module, x), passes(reference, x))
    assert repr(module) == repr(reference)


@pytest.mark.parametrize("kind", ["layer norm", "layer norm of two axes", "RMS norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_kept_around_zero(one, kind, dtype):
    reference, module, shape = pair(one, kind, dtype, weight_offset=1.0)
    x = random(*shape, dtype=dtype)
    assert_same(passes(module, x), passes(reference, x), dtype)
    assert repr(module) == repr(reference)
    # Beside 1, bfloat16 would lose them.
    assert one.calls[0].tensors["weight"].dtype.value == "float32"
    module.reset_parameters()
    assert not module.weight.any()


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("is_last", [False, True])
def test_group_norm_with_scale_and_shift(one, activation, is_last):
    reference, module, shape = pair(one, "group norm", activation=activation)
    x, scale, shift = random(*shape), random(2, 12, seed=1), random(2, 12, seed=2)
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    assert_same(passes(module, x, scale, shift), passes(reference, x, scale, shift))
    for parameter in (*reference.parameters(), *module.parameters()):
        parameter.requires_grad_(False)
    of_scale = [
        torch.autograd.grad(each(x, leaf, shift), leaf, x)[0]
        for each, leaf in ((module, scale.clone().requires_grad_()), (reference, scale.clone().requires_grad_()))
    ]
    assert_same(of_scale[:1], of_scale[1:])
    assert ("shift" in one.calls[-1].tensors) == (activation != "none")


@pytest.mark.parametrize("shape", [(2, 12, 5), (2, 12, 4, 5), (2, 12, 2, 3, 4), (2, 12, 1, 1), (1, 12, 4, 5)])
def test_channels_last_is_neither_copied_nor_lost(one, shape):
    reference, module, _ = pair(one, "group norm")
    x = random(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    results = passes(module, x)
    assert_same(results, passes(reference, x))
    for tensor in results[:2]:
        assert tensor.movedim(1, -1).is_contiguous()
    whole = x.is_contiguous()
    assert one.calls[0].params["layout"] == ("nchw" if whole else "nhwc")


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_strides_do_not_matter(one, kind):
    reference, module, shape = pair(one, kind)
    expanded = torch.ones(()).expand(shape)
    for x in (
        random(*shape[::-1]).permute(*range(len(shape))[::-1]),
        random(*shape[:-1], 2 * shape[-1])[..., ::2],
        random(1, *shape[1:]).expand(shape),
        torch.conj(torch.complex(random(*shape), random(*shape, seed=1))).imag,
    ):
        assert tuple(x.shape) == shape
        contiguous = x.clone(memory_format=torch.contiguous_format)
        assert_same(passes(module, x, dy=expanded), passes(reference, contiguous, dy=expanded))


@pytest.mark.parametrize("kind", ["layer norm", "layer norm of two axes", "RMS norm", "group norm"])
def test_no_rows(client, kind):
    _, module, shape = pair(client, kind)
    y, dx, *gradients = passes(module, random(0, *shape[1:]))
    assert y.shape == dx.shape == (0, *shape[1:])
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        assert torch.equal(gradient, torch.zeros_like(parameter))


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


def trained(norms):
    """The losses of thirty steps of a model of two norms."""
    torch.manual_seed(0)
    first, second = norms
    model = nn.Sequential(nn.Linear(8, 32), first, nn.GELU(), nn.Linear(32, 32), second, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    numbers, losses = torch.Generator().manual_seed(1), []
    for _ in range(30):
        x = torch.randn(64, 8, generator=numbers)
        loss = (model(x) - x[:, :2].prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_a_model_trains_as_with_the_kernels_in_its_own_process(client):
    expected = trained([fusednorm.LayerNorm(32), fusednorm.RMSNorm(32, activation="silu")])
    losses = trained([remote.LayerNorm(32, client=client), remote.RMSNorm(32, activation="silu", client=client)])
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert len(client.calls) == 30 * 2 * 2


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
    for tensor in (*saved[-2:], module.weight.grad, module.bias.grad):
        assert tensor.data_ptr() not in client.addresses


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
        monkeypatch.setattr(remote.autograd, "_AUTOCASTING_DEVICES", ("cpu",))
        results = passes(module, x)
    assert results[0].dtype == torch.float32
    expected = passes(module, x.float())
    assert_same(results, (expected[0], expected[1].bfloat16(), *expected[2:]))


def test_failures_are_the_clients(client):
    _, module, shape = pair(client, "layer norm")
    with pytest.raises(TypeError, match="float64"):
        module(random(*shape).double())
    module.eps = 0.0
    with pytest.raises(InvalidRequestError, match="eps"):
        module(random(*shape))
    _, groups, _ = pair(client, "group norm")
    with pytest.raises(InvalidRequestError):
        groups(random(2, 13, 4))


def test_a_failure_of_backward_is_raised_where_that_is_called(one, tmp_path):
    _, module, shape = pair(one, "layer norm")
    y = module(random(*shape).requires_grad_())
    with Client(f"unix://{tmp_path / 'nobody'}", retries=RetryPolicy(tries=1)) as other:
        module.client = other
        with pytest.raises(ConnectionFailedError):
            module(random(*shape))
    # Of the client that forward had.
    y.sum().backward()
    assert one.calls[-1].path.endswith("/backward")


def test_a_service_that_ends_before_backward(launched):
    server = launched()
    with Client(server.url, retries=RetryPolicy(tries=1)) as client:
        _, module, shape = pair(client, "RMS norm")
        y = module(random(*shape).requires_grad_())
        server.stop()
        with pytest.raises(ConnectionFailedError):
            y.sum().backward()


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_copies_share_the_client_and_pickles_leave_it(one, kind):
    _, module, shape = pair(one, kind, activation="silu")
    x = random(*shape)
    expected = module(x)
    copied = copy.deepcopy(nn.Sequential(module))[0]
    assert copied.client is one
    assert copied.weight is not module.weight
    assert torch.equal(copied(x), expected)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        with pytest.raises(RuntimeError, match="has no client, which pickling leaves behind"):
            again(x)
        again.client = one
        assert torch.equal(again(x), expected)
    assert module.client is one


def test_a_client_of_its_own_in_a_copy(one, urls):
    _, module, _ = pair(one, "layer norm")
    copied = copy.deepcopy(module)
    with Client(urls["http"]) as other:
        copied.client = other
        assert copied.client is other
        assert module.client is one


def _forked(module, x, results):
    results.put([tensor.numpy() for tensor in passes(module, x)])


def test_a_module_in_a_forked_process(client):
    _, module, shape = pair(client, "layer norm")
    x = random(*shape)
    expected = passes(module, x)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_forked, args=(module, x, results))
    process.start()
    try:
        got = [torch.from_numpy(array) for array in results.get()]
    finally:
        process.kill()
        process.join()
    assert_same(got, expected)


def test_a_model_in_shared_memory_from_end_to_end(one):
    """x where the server sees it: neither it nor any result between the layers is copied on its way."""
    x = one.empty((4, 16), torch.float32)
    x.copy_(random(4, 16))
    model = nn.Sequential(*(remote.LayerNorm(16, client=one) for _ in range(3)))
    expected = nn.Sequential(*(nn.LayerNorm(16) for _ in range(3)))
    assert_same(passes(model, x), passes(expected, x.clone()))
