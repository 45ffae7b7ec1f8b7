"""LayerNorm and RMSNorm over the channels of [B, C, *spatial], over HTTP."""

import asyncio
import uuid

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normserve.client import AsyncClient, Client

from tests.integration.api.operations.cases import assert_close, post
from tests.integration.harness.wire import SAFETENSORS, packed

OPS = ("layer_norm", "rms_norm")
NCHW = {"layout": "nchw"}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def normalised(op, h, weight=None):
    """The norm over the channels of h, by torch's function of rows."""
    rows = h.movedim(1, -1)
    if op == "layer_norm":
        return F.layer_norm(rows, rows.shape[-1:], weight).movedim(-1, 1)
    return F.rms_norm(rows, rows.shape[-1:], weight, 1e-6).movedim(-1, 1)


def spread(of_samples, x):
    return of_samples.reshape(*of_samples.shape, *(1,) * (x.dim() - 2))


def both_passes(op, given, dy):
    """y, residual_out and the gradients of all that went in, of torch in float64."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    x = leaves["x"]
    h = x * spread(leaves["gate"], x) if "gate" in leaves else x
    h = h + leaves["residual"] if "residual" in leaves else h
    z = normalised(op, h, leaves.get("weight"))
    if "scale" in leaves:
        z = z * (1 + spread(leaves["scale"], x)) + spread(leaves["shift"], x)
    y = F.silu(z)
    y.backward(dy.double())
    gradients = {f"d{name}": leaf.grad.to(given[name].dtype) for name, leaf in leaves.items()}
    forward = {"y": y.detach().to(given["x"].dtype)}
    if "residual" in given:
        forward["residual_out"] = h.detach().to(given["residual"].dtype)
    return forward, gradients


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (3, 8, 5), (2, 8, 4, 3), (1, 48, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_both_passes(api, op, shape, gated):
    given = {"x": torch.randn(shape), "residual": torch.randn(shape).half()}
    given |= {"weight": torch.randn(shape[1]).bfloat16()}
    given |= {"scale": torch.randn(shape[:2]).half(), "shift": torch.randn(shape[:2])}
    if gated:
        given["gate"] = torch.randn(shape[:2]).bfloat16()
    dy, query = torch.randn(shape), {"activation": "silu"} | NCHW
    forward, gradients = both_passes(op, given, dy)
    assert_close(post(api, f"/v1/{op}", packed(**given), **query), forward)
    assert_close(post(api, f"/v1/{op}/backward", packed(**given, dy=dy), **query), gradients)


@pytest.mark.parametrize("op", OPS)
def test_statistics_are_of_each_position(api, op):
    x, dy = torch.randn(2, 8, 4, 3), torch.randn(2, 8, 4, 3)
    got = post(api, f"/v1/{op}", packed(x=x), stats="true", **NCHW)
    rstd = (x.var(1, correction=0) + 1e-5).rsqrt() if op == "layer_norm" else (x.square().mean(1) + 1e-6).rsqrt()
    right = {"y": normalised(op, x), "rstd": rstd} | ({"mean": x.mean(1)} if op == "layer_norm" else {})
    assert_close(got, right)
    saved = {name: got[name] for name in got if name != "y"}
    one, other = (post(api, f"/v1/{op}/backward", packed(x=x, dy=dy, **more), **NCHW)["dx"] for more in ({}, saved))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("op", OPS)
def test_channels_that_are_last_are_rows(api, op):
    x = torch.randn(2, 4, 3, 8)
    one, other = (post(api, f"/v1/{op}", packed(x=x), **query)["y"] for query in ({}, {"layout": "nhwc"}))
    assert torch.equal(one, other)
    first = post(api, f"/v1/{op}", packed(x=x.movedim(-1, 1).contiguous()), **NCHW)["y"]
    assert torch.equal(first, one.movedim(-1, 1))


def test_dropout_is_that_of_rows(api):
    x, query = torch.randn(2, 8, 4), {"dropout": 0.5, "seed": 7}
    rows = post(api, "/v1/layer_norm", packed(x=x.movedim(1, -1).contiguous()), **query)["y"]
    assert torch.equal(post(api, "/v1/layer_norm", packed(x=x), **query, **NCHW)["y"], rows.movedim(-1, 1))


@pytest.mark.parametrize("op", OPS)
def test_a_layer_is_for_either_layout(api, op):
    path, weight = f"/v1/layers/test.{uuid.uuid4().hex}", torch.randn(8)
    content, headers = packed(weight=weight), {"content-type": SAFETENSORS}
    params = {"op": op, "activation": "silu"}
    assert api.put(path, content=content, params=params, headers=headers).status_code == 201
    x, dy, query = torch.randn(2, 8, 4, 3), torch.randn(2, 8, 4, 3), {"layer": path.rpartition("/")[2]} | NCHW
    forward, gradients = both_passes(op, {"x": x, "weight": weight}, dy)
    try:
        assert_close(post(api, f"/v1/{op}", packed(x=x), **query), forward)
        assert_close(post(api, f"/v1/{op}/backward", packed(x=x, dy=dy), **query), gradients)
        rows = post(api, f"/v1/{op}", packed(x=x.movedim(1, -1).contiguous()), layer=query["layer"])["y"]
        torch.testing.assert_close(rows, forward["y"].movedim(1, -1), atol=1e-5, rtol=1e-5)
    finally:
        api.delete(path)


def test_bytes_are_counted_as_those_of_rows(api):
    given = {"x": torch.ones(2, 8, 3), "scale": torch.ones(2, 8).half()}
    headers = {"content-type": SAFETENSORS}
    forward = api.post("/v1/rms_norm", content=packed(**given), headers=headers, params=NCHW)
    content = packed(**given, dy=torch.ones(2, 8, 3))
    backward = api.post("/v1/rms_norm/backward", content=content, headers=headers, params=NCHW)
    assert int(forward.headers["x-kernel-bytes"]) == 2 * given["x"].nbytes + given["scale"].nbytes
    assert int(backward.headers["x-kernel-bytes"]) == 3 * given["x"].nbytes + 2 * given["scale"].nbytes


@pytest.mark.parametrize(
    ("tensors", "query", "code", "said"),
    [
        ({"x": torch.ones(8)}, NCHW, "invalid_shape", "with layout=nchw x must be [B, C, *spatial]"),
        ({"weight": torch.ones(8, 3)}, NCHW, "invalid_shape", "parameters of each head need layout=nhwc"),
        ({"weight": torch.ones(3)}, NCHW, "invalid_shape", "got [3]; with layout=nhwc x has 3 channels"),
        ({"weight": torch.ones(8)}, {}, "invalid_shape", "got [8]; with layout=nchw x has 8 channels"),
        ({"scale": torch.ones(2, 3)}, NCHW, "invalid_shape", "scale must be [2, 8], got [2, 3]"),
        ({"gate": torch.ones(2, 8)}, NCHW, "missing_tensor", "gate needs a residual"),
        ({}, NCHW | {"out_dtype": "float8_e4m3fn"}, "invalid_parameter", "float8_e4m3fn needs layout=nhwc"),
        ({}, {"layout": "chwn"}, "invalid_parameter", "layout must be one of nchw, nhwc, got 'chwn'"),
    ],
)
def test_what_is_refused(api, tensors, query, code, said):
    content = packed(**{"x": torch.randn(2, 8, 3)} | tensors)
    response = api.post("/v1/layer_norm", content=content, params=query, headers={"content-type": SAFETENSORS})
    assert response.status_code in (400, 422)
    assert response.json()["code"] == code
    assert said in response.json()["detail"]


def test_several_x_are_samples_of_one(api):
    xs, scales = [torch.randn(count, 8, 3) for count in (2, 1)], [torch.randn(count, 8) for count in (2, 1)]
    tensors = {f"x.{number}": x for number, x in enumerate(xs)}
    tensors |= {f"scale.{number}": scale for number, scale in enumerate(scales)}
    got = post(api, "/v1/layer_norm", packed(**tensors), stats="true", **NCHW)
    for number, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        right = normalised("layer_norm", x) * (1 + scale[..., None])
        torch.testing.assert_close(got[f"y.{number}"], right, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[f"mean.{number}"], x.mean(1))


def test_no_samples(api):
    x = torch.empty(0, 8, 4, 3)
    assert post(api, "/v1/layer_norm", packed(x=x), stats="true", **NCHW)["mean"].shape == (0, 4, 3)
    got = post(api, "/v1/layer_norm/backward", packed(x=x, dy=x, weight=torch.ones(8)), **NCHW)
    assert got["dx"].shape == x.shape
    assert not got["dweight"].any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_the_client(server, op, kind):
    x, dy = (torch.randn(2, 4, 3, 8).movedim(-1, 1) for _ in range(2))
    given = {"x": x, "residual": torch.randn(2, 8, 4, 3), "weight": torch.randn(8)}
    given |= {name: torch.randn(2, 8) for name in ("scale", "shift", "gate")}
    forward, gradients = both_passes(op, given, dy)
    if kind == "numpy":
        given, dy = {name: tensor.numpy() for name, tensor in given.items()}, dy.numpy()
    with Client(server.url) as client:
        result = getattr(client, op)(**given, **NCHW, activation="silu", stats=True)
        saved = {"rstd": result.rstd} | ({"mean": result.mean} if op == "layer_norm" else {})
        backward = getattr(client, f"{op}_backward")(dy, **given, **saved, **NCHW, activation="silu")
    assert type(result.y) is type(backward.dx) is type(given["x"])
    assert result.rstd.shape == (2, 4, 3)
    torch.testing.assert_close(torch.as_tensor(result.y), forward["y"], atol=1e-4, rtol=1e-4)
    for name, right in gradients.items():
        torch.testing.assert_close(torch.as_tensor(getattr(backward, name)), right, atol=1e-4, rtol=1e-4)


def test_many_requests_with_samples_of_their_own(server):
    requests = []
    for count in (1 + i % 3 for i in range(24)):
        given = {name: torch.randn(count, 8, 5) for name in ("x", "residual")}
        requests.append(given | {name: torch.randn(count, 8) for name in ("scale", "gate")})

    async def main():
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.layer_norm(**given, **NCHW) for given in requests))

    for given, result in zip(requests, asyncio.run(main()), strict=True):
        h = given["residual"] + given["gate"][..., None] * given["x"]
        right = normalised("layer_norm", h) * (1 + given["scale"][..., None])
        torch.testing.assert_close(result.y, right, atol=1e-5, rtol=1e-5)
