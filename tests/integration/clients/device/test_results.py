"""Results of tensors in the memory of the server's GPU are those of HTTP; needs a GPU."""

import asyncio

import numpy as np
import pytest
import torch
from normserve.client import AsyncClient
from normserve.client import torch as remote
from torch import nn

from tests.integration.clients.device.serving import ONCE, assert_same, metric, random

pytestmark = pytest.mark.gpu


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


OPTIONS = {
    "layer_norm": {},
    "rms_norm": {},
    "group_norm": {"num_groups": 4},
    "layer_norm nchw": {"layout": "nchw"},
    "rms_norm nchw": {"layout": "nchw"},
    "group_norm nhwc": {"num_groups": 4, "layout": "nhwc"},
}


REST = [(name, torch.bfloat16) for name in OPTIONS if name != "layer_norm"]


def tensors_for(name, dtype, *, backward=False):
    samples = name.startswith("group") or name.endswith("nchw")
    shape = (3, 5, 6, 16) if name.endswith("nhwc") else (3, 16, 5, 6) if samples else (37, 1024)
    size = 16 if samples else 1024
    tensors = {"x": random(*shape, dtype=dtype), "residual": random(*shape, seed=1, dtype=dtype)}
    tensors["weight"] = random(size, seed=2)
    if not name.startswith("rms_norm"):
        tensors["bias"] = random(size, seed=3, dtype=dtype)
    if samples:
        tensors |= {"scale": random(3, size, seed=4), "shift": random(3, size, seed=5, dtype=dtype)}
    if backward:
        tensors |= {"dy": random(*shape, seed=6, dtype=dtype), "dresidual_out": random(*shape, seed=7, dtype=dtype)}
    return tensors


@pytest.mark.parametrize(("name", "dtype"), [("layer_norm", each) for each in DTYPES] + REST)
def test_results_are_those_of_http_to_the_bit(serving, http, local, until, name, dtype):
    op = name.split(maxsplit=1)[0]
    before = metric(serving, "requests_total", 'transport="local_cuda"')
    for options in (
        {},
        {"stats": True, "activation": "silu"},
        {"dropout": 0.25, "seed": 7, "out_dtype": "float16"},
    ):
        given = tensors_for(name, dtype)
        assert_same(
            getattr(local, op)(**given, **OPTIONS[name], **options),
            getattr(http, op)(**given, **OPTIONS[name], **options),
        )
    given = tensors_for(name, dtype, backward=True)
    assert_same(
        getattr(local, f"{op}_backward")(**given, **OPTIONS[name]),
        getattr(http, f"{op}_backward")(**given, **OPTIONS[name]),
    )
    until(lambda: metric(serving, "requests_total", 'transport="local_cuda"') == before + 4)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_float8_with_its_scale_and_parameters_of_each_head(http, local, op):
    x, residual = random(40, 8, 128, dtype=torch.bfloat16), random(40, 8, 128)
    results = [getattr(each, op)(x, residual=residual, out_dtype="float8_e4m3fn") for each in (local, http)]
    for name in ("y", "scale", "residual_out"):
        first, second = (getattr(each, name) for each in results)
        assert first.dtype == second.dtype
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    weight = random(8, 128, seed=2)
    assert_same(*[getattr(each, op)(x, weight, residual=residual, weight_offset=1) for each in (local, http)])
    backward = f"{op}_backward"
    assert_same(*[getattr(each, backward)(x, x, weight, residual=residual) for each in (local, http)])


def test_a_chain(http, local):
    x, weights, biases = (
        random(40, 1024),
        [random(1024, seed=1), None, random(1024, seed=2)],
        [random(1024, seed=3)],
    )
    assert_same(*[each.layer_norm_chain(x, weights, biases) for each in (local, http)])
    for name, weight in (("chain-a", weights[0]), ("chain-b", weights[2])):
        http.put_layer(name, "layer_norm", weight, biases[0])
    named = {"layers": ["chain-b", "chain-a", "chain-b"], "out_dtype": torch.bfloat16}
    assert_same(*[each.layer_norm_chain(x, **named) for each in (local, http)])


def test_several_tensors(http, local):
    x, weight = [random(rows, 512, seed=rows) for rows in (3, 1, 40)], random(512)
    got, whole = local.layer_norm(x, weight, stats=True), http.layer_norm(torch.cat(x), weight, stats=True)
    assert all(each.is_cuda for each in got.y)
    assert torch.equal(torch.cat(got.y), whole.y)
    assert torch.equal(torch.cat(got.rstd), whole.rstd)
    gradients = local.layer_norm_backward(x, x, weight)
    assert torch.equal(torch.cat(gradients.dx), http.layer_norm_backward(torch.cat(x), torch.cat(x), weight).dx)


def test_a_chain_that_comes_often_is_replayed_on_what_lies_there_then(http, local):
    x, *weights = (local.empty(shape, torch.float32, device="cuda") for shape in ((9, 1024), (1024,), (1024,)))
    for number in range(5):
        for place, tensor in enumerate((x, *weights)):
            tensor.copy_(random(*tensor.shape, seed=10 * number + place))
        for _ in range(100):
            y = local.layer_norm_chain(x, weights).y
        assert torch.equal(y, http.layer_norm_chain(x, weights).y)


def test_a_residual_of_another_type_and_no_rows_at_all(http, local):
    x, residual = random(5, 64, dtype=torch.bfloat16), random(5, 64)
    assert_same(local.layer_norm(x, residual=residual), http.layer_norm(x, residual=residual))
    empty = torch.empty(0, 64, device="cuda")
    assert local.layer_norm(empty).y.shape == (0, 64)
    weight = random(64)
    gradients = local.layer_norm_backward(empty, empty, weight)
    assert gradients.dx.shape == (0, 64)
    assert torch.equal(gradients.dweight, torch.zeros_like(weight))


def test_registered_layers(http, local):
    weight, bias = random(256), random(256, seed=1)
    http.put_layer("on-device", "layer_norm", weight, bias, eps=1e-3)
    x = random(9, 256)
    assert_same(local.layer_norm(x, layer="on-device"), http.layer_norm(x, layer="on-device"))
    got = local.layer_norm_backward(x, x, layer="on-device")
    assert_same(got, http.layer_norm_backward(x, x, layer="on-device"))


@pytest.mark.parametrize("rows", [1, 2048])
def test_what_comes_often_is_replayed_on_what_lies_there_then(http, local, rows):
    x, dy = (local.empty((rows, 1024), torch.float32, device="cuda") for _ in range(2))
    weight = local.empty((1024,), device="cuda")
    # Until a call is captured it takes two hundred of each place of its results.
    for number in range(7):
        for tensor in (x, dy, weight):
            tensor.copy_(random(*tensor.shape, seed=number))
        for _ in range(100):
            y = local.layer_norm(x, weight).y
            gradients = local.layer_norm_backward(dy, x, weight)
        assert torch.equal(y, http.layer_norm(x, weight).y)
        assert_same(gradients, http.layer_norm_backward(dy, x, weight))


def test_a_view_with_strides_is_copied_once(http, local):
    x = random(64, 2, 512)[:, 1]
    assert not x.is_contiguous()
    assert_same(local.layer_norm(x), http.layer_norm(x.contiguous()))


def test_tensors_of_the_host_go_along(http, local):
    x, weight = random(8, 128), torch.full((128,), 3.0)
    assert_same(local.layer_norm(x, weight), http.layer_norm(x, weight.cuda()))
    gradients = local.layer_norm_backward(x, x, weight)
    assert gradients.dx.is_cuda
    assert not gradients.dweight.is_cuda
    on_host = local.layer_norm(x.cpu(), weight.cuda())
    assert not on_host.y.is_cuda


def test_the_asynchronous_client(serving, path, http):
    async def ask():
        async with AsyncClient(f"unix://{path}", retries=ONCE) as client:
            x = await client.empty((33, 256), torch.bfloat16, device="cuda")
            x.normal_()
            torch.cuda._sleep(50_000_000)
            results = await asyncio.gather(*[client.layer_norm(x, eps=1e-5 * (1 + n)) for n in range(20)])
            for number, result in enumerate(results):
                assert_same(result, http.layer_norm(x, eps=1e-5 * (1 + number)))

    asyncio.run(ask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_train(local, dtype):
    import fusednorm

    def model(kinds):
        layer, rms, group = kinds
        torch.manual_seed(3)
        mixed = (nn.Unflatten(1, (16, 4)), group, nn.Flatten())
        layers = (nn.Linear(32, 64), layer, nn.Linear(64, 64), rms, *mixed, nn.Linear(64, 8))
        return nn.Sequential(*layers).to("cuda", dtype)

    made = {"device": "cuda", "dtype": dtype}
    ours = model(
        (
            remote.LayerNorm(64, client=local, **made),
            remote.RMSNorm(64, client=local, **made),
            remote.GroupNorm(4, 16, client=local, **made),
        )
    )
    rows = (fusednorm.LayerNorm(64, **made), fusednorm.RMSNorm(64, **made))
    theirs = model((*rows, fusednorm.GroupNorm(4, 16, **made)))
    theirs.load_state_dict(ours.state_dict())
    losses = []
    for each in (ours, theirs):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for step in range(20):
            x = random(64, 32, seed=step, dtype=dtype)
            optimizer.zero_grad()
            loss = (each(x) - x[:, :8].tanh()).float().square().mean()
            loss.backward()
            assert all(parameter.grad.is_cuda for parameter in each.parameters())
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4 if dtype is torch.float32 else 5e-2)
