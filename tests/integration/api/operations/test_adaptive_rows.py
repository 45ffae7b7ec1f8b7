"""LayerNorm and RMSNorm with a scale and a shift of each sample of rows, over HTTP."""

import asyncio
import uuid

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normserve.client import AsyncClient, Client

from tests.integration.api.operations.cases import assert_close, post
from tests.integration.harness.wire import SAFETENSORS, packed

OPS = ("layer_norm", "rms_norm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def adaptive(op, given, dy):
    """y and the gradients of all that went in, of torch in float64; y before the rounding to x's type."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    x, weight = leaves["x"], leaves.get("weight")
    cols = x.shape[-1:]
    z = F.layer_norm(x, cols, weight) if op == "layer_norm" else F.rms_norm(x, cols, weight, 1e-6)
    scale, shift = (spread(leaves[name], x) for name in ("scale", "shift"))
    y = F.silu(z * (1 + scale) + shift)
    y.backward(dy.double())
    return y.detach(), {f"d{name}": leaf.grad.to(given[name].dtype) for name, leaf in leaves.items()}


def spread(given, x):
    """The tensor of samples with an axis of one element for each axis of x that it does not have."""
    axes = given.dim() - 1
    return given.reshape(*given.shape[:-1], *(1,) * (x.dim() - 1 - axes), given.shape[-1])


@pytest.mark.parametrize("of", [(8,), (2, 8), (2, 1, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_both_passes(api, op, of):
    given = {"x": torch.randn(2, 3, 8), "weight": torch.randn(8).bfloat16()}
    given |= {"scale": torch.randn(of).half(), "shift": torch.randn(of)}
    dy = torch.randn(2, 3, 8)
    y, gradients = adaptive(op, given, dy)
    query = {"activation": "silu"}
    assert_close(post(api, f"/v1/{op}", packed(**given), **query), {"y": y.float()})
    assert_close(post(api, f"/v1/{op}/backward", packed(**given, dy=dy), **query), gradients)


@pytest.mark.parametrize("op", OPS)
def test_a_gate_multiplies_x_before_the_residual_is_added(api, op):
    given = {"x": torch.randn(2, 3, 8), "residual": torch.randn(2, 3, 8), "gate": torch.randn(2, 1, 8).half()}
    dy, outside = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    h = leaves["residual"] + leaves["gate"] * leaves["x"]
    y = F.layer_norm(h, (8,)) if op == "layer_norm" else F.rms_norm(h, (8,), eps=1e-6)
    gradients = torch.autograd.grad((y, h), list(leaves.values()), (dy.double(), outside.double()))
    forward = {"y": y.detach().float(), "residual_out": h.detach().float()}
    assert_close(post(api, f"/v1/{op}", packed(**given)), forward)
    backward = {f"d{name}": each.to(given[name].dtype) for name, each in zip(given, gradients, strict=True)}
    assert_close(post(api, f"/v1/{op}/backward", packed(**given, dy=dy, dresidual_out=outside)), backward)


def test_a_scale_of_samples_goes_in_and_a_scale_of_float8_rows_comes_out(api):
    x, scale = torch.randn(2, 3, 8), torch.randn(2, 8)
    got = post(api, "/v1/layer_norm", packed(x=x, scale=scale), out_dtype="float8_e4m3fn")
    assert got["scale"].shape == (2, 3)
    right = F.layer_norm(x, (8,)) * (1 + scale[:, None])
    torch.testing.assert_close(got["y"].float() * got["scale"].unsqueeze(-1), right, atol=0.2, rtol=0.07)


def test_a_layer_takes_scale_and_shift_beside_it(api):
    path, weight = f"/v1/layers/test.{uuid.uuid4().hex}", torch.randn(8)
    content, headers = packed(weight=weight), {"content-type": SAFETENSORS}
    params = {"op": "layer_norm", "activation": "silu"}
    assert api.put(path, content=content, params=params, headers=headers).status_code == 201
    given = {"x": torch.randn(2, 3, 8), "scale": torch.randn(2, 8), "shift": torch.randn(2, 8)}
    dy, query = torch.randn(2, 3, 8), {"layer": path.rpartition("/")[2]}
    y, gradients = adaptive("layer_norm", given | {"weight": weight}, dy)
    try:
        assert_close(post(api, "/v1/layer_norm", packed(**given), **query), {"y": y.float()})
        assert_close(post(api, "/v1/layer_norm/backward", packed(**given, dy=dy), **query), gradients)
    finally:
        api.delete(path)


def test_bytes_of_samples_are_counted(api):
    given = {"x": torch.ones(2, 3, 8), "scale": torch.ones(2, 8).half(), "shift": torch.ones(2, 1, 8)}
    headers = {"content-type": SAFETENSORS}
    of_samples = 2 * 8 * (2 + 4)
    forward = api.post("/v1/rms_norm", content=packed(**given), headers=headers)
    backward = api.post("/v1/rms_norm/backward", content=packed(**given, dy=torch.ones(2, 3, 8)), headers=headers)
    assert int(forward.headers["x-kernel-bytes"]) == 2 * given["x"].nbytes + of_samples
    assert int(backward.headers["x-kernel-bytes"]) == 3 * given["x"].nbytes + 2 * of_samples


@pytest.mark.parametrize(
    ("tensors", "query", "code"),
    [
        ({"scale": torch.zeros(3, 8)}, {}, "invalid_shape"),
        ({"scale": torch.zeros(2, 1, 3, 8)}, {}, "invalid_shape"),
        ({"scale": torch.zeros(())}, {}, "invalid_shape"),
        ({"scale": torch.zeros(2, 0, 8)}, {}, "invalid_shape"),
        ({"scale": torch.zeros(2, 8), "shift": torch.zeros(2, 3, 8)}, {}, "invalid_shape"),
        ({"scale": torch.zeros(2, 8).double()}, {}, "unsupported_dtype"),
        ({"scale": torch.zeros(2, 8), "weight": torch.ones(3, 8)}, {}, "invalid_shape"),
        ({"gate": torch.zeros(2, 8)}, {}, "missing_tensor"),
        ({"gate": torch.zeros(3, 8), "residual": torch.zeros(2, 3, 8)}, {}, "invalid_shape"),
    ],
)
def test_what_is_refused(api, tensors, query, code):
    content, headers = packed(x=torch.randn(2, 3, 8), **tensors), {"content-type": SAFETENSORS}
    response = api.post("/v1/layer_norm", content=content, params=query, headers=headers)
    assert response.status_code == 422
    assert response.json()["code"] == code


def test_samples_of_several_x(api):
    """Each scale begins with its x's first axis: a row for all of one x cannot be joined to others."""
    xs, scales = [torch.randn(count, 3, 8) for count in (2, 1)], [torch.randn(count, 8) for count in (2, 1)]
    tensors = {f"x.{number}": x for number, x in enumerate(xs)}
    got = post(api, "/v1/layer_norm", packed(**tensors, **{f"scale.{n}": scale for n, scale in enumerate(scales)}))
    for number, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        right = F.layer_norm(x, (8,)) * (1 + scale[:, None])
        torch.testing.assert_close(got[f"y.{number}"], right, atol=1e-5, rtol=1e-5)
    rows = {
        "x.0": torch.randn(4, 8),
        "x.1": torch.randn(4, 8),
        "scale.0": torch.zeros(4),
        "scale.1": torch.zeros(4),
    }
    response = api.post("/v1/layer_norm", content=packed(**rows), headers={"content-type": SAFETENSORS})
    assert response.status_code == 422
    assert "scale.0 must be [4, ..., N], got [4]" in response.json()["detail"]


def test_samples_without_rows(api):
    x, scale = torch.empty(3, 0, 8), torch.randn(3, 8)
    got = post(api, "/v1/layer_norm/backward", packed(x=x, dy=x, scale=scale, weight=torch.ones(8)))
    assert got["dx"].shape == x.shape
    assert torch.equal(got["dscale"], torch.zeros(3, 8))
    assert not got["dweight"].any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_the_client_takes_parts_of_a_wider_tensor(server, op, kind):
    x, dy = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    scale, shift = torch.randn(2, 48).chunk(6, dim=1)[:2]
    given = {"x": x, "scale": scale, "shift": shift}
    y, gradients = adaptive(op, given, dy)
    if kind == "numpy":
        given, dy = {name: tensor.numpy() for name, tensor in given.items()}, dy.numpy()
    with Client(server.url) as client:
        forward = getattr(client, op)(**given, activation="silu")
        backward = getattr(client, f"{op}_backward")(dy, **given, activation="silu")
    assert type(forward.y) is type(backward.dscale) is type(given["x"])
    torch.testing.assert_close(torch.as_tensor(forward.y), y.float(), atol=1e-4, rtol=1e-4)
    for name, right in gradients.items():
        torch.testing.assert_close(torch.as_tensor(getattr(backward, name)), right, atol=1e-4, rtol=1e-4)


def test_many_requests_with_a_scale_of_their_own(server):
    samples = [(torch.randn(1 + i % 3, 5, 8), torch.randn(1 + i % 3, 8)) for i in range(24)]

    async def main():
        async with AsyncClient(server.url) as client:
            return await asyncio.gather(*(client.layer_norm(x, scale=scale) for x, scale in samples))

    for (x, scale), result in zip(samples, asyncio.run(main()), strict=True):
        torch.testing.assert_close(result.y, F.layer_norm(x, (8,)) * (1 + scale[:, None]), atol=1e-5, rtol=1e-5)
