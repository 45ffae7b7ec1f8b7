"""GroupNorm over HTTP: all that is fused with it, in both layouts and passes, and each sample's scale and shift."""

import asyncio
import itertools
import uuid

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normserve.client import AsyncClient, Client
from normserve.codec.api_names import ACTIVATIONS

from tests.integration.api.operations.cases import GROUPS, Case, assert_close, post
from tests.integration.harness.wire import DTYPES, NPY, SAFETENSORS, from_npy, packed

PATH = "/v1/group_norm"
BACKWARD = "/v1/group_norm/backward"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.fixture
def layer(api):
    """The name of a layer of 8 channels, its weight and its bias."""
    name, weight, bias = f"test.{uuid.uuid4().hex}", torch.randn(8), torch.randn(8)
    params = {"op": "group_norm", "num_groups": GROUPS, "activation": "silu"}
    headers = {"content-type": SAFETENSORS}
    content = packed(weight=weight, bias=bias)
    assert api.put(f"/v1/layers/{name}", content=content, params=params, headers=headers).status_code == 201
    yield name, weight, bias
    api.delete(f"/v1/layers/{name}")


KINDS = itertools.product(DTYPES, (False, True), (False, True))


@pytest.mark.parametrize(
    ("dtype", "adaptive", "nhwc", "activation"),
    [(*kind, activation) for kind, activation in zip(KINDS, itertools.cycle(ACTIVATIONS), strict=False)],
)
def test_both_passes_with_a_residual(api, activation, adaptive, dtype, nhwc):
    """Forward returns the sum and the statistics, backward takes them and what reached the sum from elsewhere."""
    kinds = (torch.float16, torch.float32) if adaptive else (None, None)
    case = Case("group_norm", DTYPES[dtype], torch.float32, nhwc, *kinds)
    residual, dy, outside = case.like_x(), case.like_x(), case.like_x()
    query = case.query(activation=activation)
    forward = post(api, PATH, case.packed(residual=residual), **query, stats=1)
    options = {"activation": activation, "residual": residual}
    assert_close(forward, case.right("forward", case.x, **options, stats=True))
    saved = {name: forward[name] for name in ("mean", "rstd")}
    backward = post(api, BACKWARD, case.packed(residual=residual, dy=dy, dresidual_out=outside, **saved), **query)
    assert_close(backward, case.right("backward", dy, case.x, **options, dresidual_out=outside))
    names = ("weight", "bias", "scale", "shift") if adaptive else ("weight", "bias")
    assert backward.keys() == {"dx", *(f"d{name}" for name in names)}


@pytest.mark.parametrize("nhwc", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("kinds", [(torch.bfloat16, None), (None, torch.bfloat16)], ids=["scale", "shift"])
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["bare", "affine"])
def test_scale_or_shift_alone(api, parameters, kinds, nhwc):
    case = Case("group_norm", torch.float32, parameters, nhwc, *kinds)
    dy, query = case.like_x(), case.query(activation="gelu_tanh")
    right = case.right("forward", case.x, activation="gelu_tanh")
    assert_close(post(api, PATH, case.packed(), **query), right)
    right = case.right("backward", dy, case.x, activation="gelu_tanh")
    assert_close(post(api, BACKWARD, case.packed(dy=dy), **query), right)


@pytest.mark.parametrize("nhwc", [False, True], ids=["nchw", "nhwc"])
def test_dropout_comes_after_scale_and_shift(api, nhwc):
    case = Case("group_norm", torch.float32, torch.float32, nhwc, torch.float32, torch.float32)
    dy, options = case.like_x(), {"dropout": 0.3, "seed": 5}
    assert_close(post(api, PATH, case.packed(), **case.query(**options)), case.right("forward", case.x, **options))
    right = case.right("backward", dy, case.x, **options)
    assert_close(post(api, BACKWARD, case.packed(dy=dy), **case.query(**options)), right)


@pytest.mark.parametrize("spatial", [(), (7,), (2, 3, 4)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_scale_and_shift_have_one_shape_whatever_xs_rank(api, layout, spatial):
    x = torch.randn(3, 4, *spatial)
    sent = x.movedim(1, -1) if layout == "nhwc" else x
    scale, shift = torch.randn(3, 4), torch.randn(3, 4)
    content = packed(x=sent, scale=scale, shift=shift)
    y = post(api, PATH, content, num_groups=2, layout=layout)["y"]
    of_positions = (..., *(None for _ in spatial))
    right = F.group_norm(x, 2) * (1 + scale[of_positions]) + shift[of_positions]
    torch.testing.assert_close(y.movedim(-1, 1) if layout == "nhwc" else y, right, atol=2e-6, rtol=1e-5)


def test_a_layer_takes_scale_and_shift_beside_it(api, layer):
    name, weight, bias = layer
    case = Case("group_norm", torch.float32, None, False, torch.float32, torch.float32)
    dy = case.like_x()
    forward = post(api, PATH, case.packed(), layer=name)
    backward = post(api, BACKWARD, case.packed(dy=dy), layer=name)
    case.weight, case.bias = weight, bias
    assert_close(forward, case.right("forward", case.x, activation="silu"))
    assert_close(backward, case.right("backward", dy, case.x, activation="silu"))


def test_an_answer_in_npy_is_y_alone(api):
    case = Case("group_norm", torch.float32, None, False, torch.float16, torch.float16)
    headers = {"content-type": SAFETENSORS, "accept": NPY}
    response = api.post(PATH, content=case.packed(), params=case.query(), headers=headers)
    assert_close({"y": torch.from_numpy(from_npy(response.content).copy())}, case.right("forward", case.x))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_no_samples_have_empty_scale_and_shift(api, layout):
    x = torch.empty((0, 8, 3) if layout == "nchw" else (0, 3, 8))
    tensors = {"x": x, "scale": torch.empty(0, 8, dtype=torch.float16), "shift": torch.empty(0, 8)}
    query = {"num_groups": GROUPS, "layout": layout}
    assert post(api, PATH, packed(**tensors), **query)["y"].shape == x.shape
    got = post(api, BACKWARD, packed(**tensors, dy=x, weight=torch.ones(8)), **query)
    assert got["dx"].shape == x.shape
    assert got["dscale"].shape == got["dshift"].shape == (0, 8)
    assert (got["dscale"].dtype, got["dshift"].dtype) == (torch.float16, torch.float32)
    assert not got["dweight"].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["scale", "shift"])
def test_what_is_not_finite_stays_in_its_channel(api, name, value):
    x, of_samples = torch.randn(2, 8, 5), torch.zeros(2, 8)
    of_samples[1, 3] = value
    y = post(api, PATH, packed(x=x, **{name: of_samples}), num_groups=GROUPS)["y"]
    plain = F.group_norm(x, GROUPS)
    broken = torch.zeros(2, 8, dtype=torch.bool)
    broken[1, 3] = True
    torch.testing.assert_close(y[~broken], plain[~broken], atol=2e-6, rtol=1e-5)
    right = plain[1, 3] * (1 + value) if name == "scale" else plain[1, 3] + value
    torch.testing.assert_close(y[1, 3], right, equal_nan=True)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_scale_and_shift_count_as_bytes(api, layout):
    shape = (2, 8, 3) if layout == "nchw" else (2, 3, 8)
    x, scale, shift = torch.ones(shape), torch.ones(2, 8, dtype=torch.float16), torch.ones(2, 8)
    content = packed(x=x, dy=torch.ones(shape), scale=scale, shift=shift)
    query, headers = {"num_groups": GROUPS, "layout": layout}, {"content-type": SAFETENSORS}
    backward = api.post(BACKWARD, content=content, params=query, headers=headers)
    content = packed(x=x, scale=scale, shift=shift, weight=torch.ones(8))
    forward = api.post(PATH, content=content, params=query, headers=headers)
    assert int(forward.headers["x-kernel-bytes"]) == 2 * x.nbytes + scale.nbytes + shift.nbytes
    assert int(backward.headers["x-kernel-bytes"]) == 3 * x.nbytes + 2 * (scale.nbytes + shift.nbytes)


def adaptive_group_norm(x, weight, bias, scale, shift, dy):
    """y, and the gradients of all that went in, of torch in float64."""
    given = {"x": x, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    z = F.group_norm(leaves["x"], 3, leaves["weight"], leaves["bias"])
    y = F.silu(z * (1 + leaves["scale"][..., None]) + leaves["shift"][..., None])
    y.backward(dy.double())
    return y.detach(), {f"d{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_client_takes_scale_and_shift(server, kind):
    x, dy, weight, bias = torch.randn(2, 6, 5), torch.randn(2, 6, 5), torch.randn(6), torch.randn(6)
    # Halves of one tensor, as a linear layer makes them.
    scale, shift = torch.randn(2, 12).chunk(2, dim=1)
    y, gradients = adaptive_group_norm(x, weight, bias, scale, shift, dy)
    given = {"x": x, "dy": dy, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    if kind == "numpy":
        given = {name: tensor.numpy() for name, tensor in given.items()}
    dy = given.pop("dy")
    with Client(server.url) as client:
        forward = client.group_norm(**given, num_groups=3, activation="silu")
        backward = client.group_norm_backward(dy, **given, num_groups=3, activation="silu")
    assert type(forward.y) is type(backward.dscale) is type(given["x"])
    torch.testing.assert_close(torch.as_tensor(forward.y).double(), y, atol=1e-4, rtol=1e-4)
    for name, right in gradients.items():
        got = torch.as_tensor(getattr(backward, name)).double()
        torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)


def test_many_adaptive_requests_of_an_asynchronous_client(server):
    samples = [
        (torch.randn(1 + i % 3, 6, 5), torch.randn(1 + i % 3, 6), torch.randn(1 + i % 3, 6)) for i in range(24)
    ]

    async def main():
        async with AsyncClient(server.url) as client:
            calls = (client.group_norm(x, 3, scale=scale, shift=shift) for x, scale, shift in samples)
            return await asyncio.gather(*calls)

    for (x, scale, shift), result in zip(samples, asyncio.run(main()), strict=True):
        right = F.group_norm(x, 3) * (1 + scale[..., None]) + shift[..., None]
        torch.testing.assert_close(result.y, right, atol=1e-5, rtol=1e-5)
