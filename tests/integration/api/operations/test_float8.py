"""float8_e4m3fn with a scale for each row: over HTTP, through the client, and where it is refused."""

import asyncio

import numpy as np
import pytest
import torch
from fusednorm.reference.float8 import quantise_rows
from normserve.client import AsyncClient, Client

from tests.integration.api.operations.cases import post
from tests.integration.harness.wire import NPY, SAFETENSORS, assert_problem, npy, packed, unpacked

FLOAT8 = {"out_dtype": "float8_e4m3fn"}


@pytest.fixture
def x():
    torch.manual_seed(8)
    return torch.randn(4, 3, 24).bfloat16()


def assert_same(y: torch.Tensor, scale: torch.Tensor, plain: torch.Tensor) -> None:
    """They are what the library makes of the float32 result."""
    expected, scales = quantise_rows(plain)
    assert y.dtype == torch.float8_e4m3fn
    assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, scales)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_y_comes_as_f8_e4m3_with_its_scale(api, op, x):
    content = packed(x=x, residual=x.clone(), weight=torch.randn(24))
    response = api.post(f"/v1/{op}", content=content, params=FLOAT8, headers={"content-type": SAFETENSORS})
    assert response.status_code == 200, response.text
    got = unpacked(response.content)
    assert got.keys() == {"y", "residual_out", "scale"}
    plain = post(api, f"/v1/{op}", content, out_dtype="float32")
    assert_same(got["y"], got["scale"], plain["y"])
    assert b'"F8_E4M3"' in response.content
    # x, the residual and the sum of 2 bytes an element, y of 1; no scales.
    assert int(response.headers["x-kernel-bytes"]) == x.numel() * (2 + 2 + 2 + 1)


def test_npy_cannot_say_it(api, x):
    content = packed(x=x)
    headers = {"content-type": SAFETENSORS, "accept": NPY}
    refused = api.post("/v1/layer_norm", content=content, params=FLOAT8, headers=headers)
    assert_problem(refused, 406, "not_acceptable")
    assert "npy has no float8_e4m3fn" in refused.json()["detail"]
    body = npy(np.ones((2, 4), np.float32))
    assert_problem(api.post("/v1/layer_norm", content=body, params=FLOAT8), 406, "not_acceptable")
    accepted = api.post("/v1/layer_norm", content=body, params=FLOAT8, headers={"accept": SAFETENSORS})
    assert unpacked(accepted.content).keys() == {"y", "scale"}


@pytest.mark.parametrize(
    ("path", "tensors", "query"),
    [
        ("/v1/group_norm", {"x": (2, 4)}, {"num_groups": 2}),
        ("/v1/layer_norm", {"x": (2, 3, 4), "weight": (3, 4)}, {}),
        ("/v1/layer_norm/backward", {"x": (2, 4), "dy": (2, 4)}, {}),
    ],
)
def test_what_makes_no_sense_is_refused(api, path, tensors, query):
    content = packed(**{name: torch.ones(shape) for name, shape in tensors.items()})
    response = api.post(path, content=content, params=query | FLOAT8, headers={"content-type": SAFETENSORS})
    assert_problem(response, 422, "invalid_parameter")
    assert "out_dtype" in response.json()["detail"]


def test_nothing_is_read_in_float8(api, x):
    content = packed(x=x.to(torch.float8_e4m3fn))
    response = api.post("/v1/layer_norm", content=content, headers={"content-type": SAFETENSORS})
    assert_problem(response, 422, "unsupported_dtype")


def test_the_open_inference_protocol_has_no_such_datatype(api):
    given = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    response = api.post("/v2/models/layer_norm/infer", json={"inputs": [given], "parameters": FLOAT8})
    assert response.status_code == 422
    assert "out_dtype must be one of float32, float16, bfloat16" in response.json()["error"]


def test_clients_give_tensors_of_torch(server, x):
    async def asynchronously():
        async with AsyncClient(server.url) as client:
            return await client.layer_norm(x, out_dtype=torch.float8_e4m3fn)

    with Client(server.url) as client:
        plain = client.layer_norm(x, out_dtype="float32").y
        assert client.layer_norm(x).scale is None
        for result in (client.layer_norm(x, **FLOAT8), asyncio.run(asynchronously())):
            assert_same(result.y, result.scale, plain)
        with pytest.raises(TypeError, match="x must be one of float32, float16, bfloat16, got float8_e4m3fn"):
            client.layer_norm(result.y)
