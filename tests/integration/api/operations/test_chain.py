"""Several LayerNorms in one request: over HTTP, the inference protocol and through the clients; what is refused."""

import asyncio
import uuid

import numpy as np
import pytest
import torch
from fusednorm.reference.chain import layer_norm_chain as right
from normserve.client import AsyncClient, Client
from tritonclient import http as triton

from tests.integration.api.operations.cases import post
from tests.integration.harness.wire import SAFETENSORS, assert_problem, packed, unpacked

PATH = "/v1/layer_norm_chain"


@pytest.fixture
def tensors():
    torch.manual_seed(21)
    named = {"weight.0": torch.randn(24), "weight.2": torch.randn(24).half(), "bias.1": torch.randn(24).bfloat16()}
    return {"x": torch.randn(4, 3, 24).bfloat16(), **named}


def expected(tensors: dict[str, torch.Tensor], eps: float = 1e-5) -> torch.Tensor:
    weights, biases = ([tensors.get(f"{name}.{n}") for n in range(3)] for name in ("weight", "bias"))
    return right(tensors["x"], weights, biases, eps=eps, out_dtype=torch.float64, precision=torch.float64)


def assert_right(y: torch.Tensor, tensors: dict[str, torch.Tensor], eps: float = 1e-5) -> None:
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2}[y.dtype]
    torch.testing.assert_close(y.double(), expected(tensors, eps), rtol=tolerance, atol=tolerance)


@pytest.fixture
def layers(api):
    """Names of three layers and what is registered under them."""
    parameters = [{"weight": torch.randn(24), "bias": torch.randn(24)}, {"weight": torch.randn(24)}]
    parameters.append({"weight": torch.randn(24).half(), "bias": torch.randn(24).half()})
    named = {f"chain.{uuid.uuid4().hex}": each for each in parameters}
    for name, each in named.items():
        query, headers = {"op": "layer_norm", "eps": 1e-3}, {"content-type": SAFETENSORS}
        assert (
            api.put(f"/v1/layers/{name}", content=packed(**each), params=query, headers=headers).status_code == 201
        )
    yield named
    for name in named:
        api.delete(f"/v1/layers/{name}")


def test_parameters_come_along(api, tensors):
    response = api.post(PATH, content=packed(**tensors), headers={"content-type": SAFETENSORS})
    assert response.status_code == 200, response.text
    assert_right(unpacked(response.content)["y"], tensors)
    # x and y of 2 bytes an element once each, however many norms.
    assert int(response.headers["x-kernel-bytes"]) == tensors["x"].numel() * 4
    wide = post(api, PATH, packed(**tensors), eps=1e-2, out_dtype="float32")
    assert wide.keys() == {"y"}
    assert_right(wide["y"], tensors, eps=1e-2)


def test_layers_by_their_names(api, layers):
    x = torch.randn(5, 24)
    named = {f"{key}.{n}": tensor for n, each in enumerate(layers.values()) for key, tensor in each.items()}
    got = post(api, PATH, packed(x=x), layers=",".join(layers))
    assert_right(got["y"], {"x": x, **named}, eps=1e-3)
    sent = post(api, PATH, packed(x=x, **named), eps=1e-3)
    assert torch.equal(got["y"], sent["y"])
    first = next(iter(layers))
    twice = post(api, PATH, packed(x=x), layers=f"{first},{first}")
    assert torch.equal(twice["y"], post(api, PATH, packed(x=x, **_twice(layers[first])), eps=1e-3)["y"])
    once = post(api, PATH, packed(x=x), layers=first)
    assert torch.equal(once["y"], post(api, "/v1/layer_norm", packed(x=x), layer=first)["y"])


def _twice(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{key}.{n}": tensor.clone() for n in range(2) for key, tensor in parameters.items()}


@pytest.mark.parametrize(
    ("names", "query", "status", "code", "message"),
    [
        (("x",), {}, 422, "missing_tensor", "needs weight.0 or another parameter"),
        (("x", "weight.8"), {}, 422, "unexpected_tensor", "got 'weight.8'"),
        (("x", "weight.01"), {}, 422, "unexpected_tensor", "got 'weight.01'"),
        (("x", "weight.-1"), {}, 422, "unexpected_tensor", "got 'weight.-1'"),
        (("x", "weight.\u0661"), {}, 422, "unexpected_tensor", "got 'weight.\u0661'"),
        (("x", "weight.0.0"), {}, 422, "unexpected_tensor", "got 'weight.0.0'"),
        (("x", "weight."), {}, 422, "unexpected_tensor", "got 'weight.'"),
        (("x", "weight"), {}, 422, "unexpected_tensor", "got 'weight'"),
        (("x", "weight.0", "residual"), {}, 422, "unexpected_tensor", "got 'residual'"),
        (("x", "weight.0"), {"activation": "silu"}, 422, "invalid_parameter", "'activation' is not a parameter"),
        (("x", "weight.0"), {"stats": 1}, 422, "invalid_parameter", "'stats' is not a parameter"),
        (("x", "weight.0"), {"layer": "a"}, 422, "invalid_parameter", "the closest is 'layers'"),
        (("x", "weight.0"), {"out_dtype": "float8_e4m3fn"}, 422, "invalid_parameter", "out_dtype must be one of"),
        (("x",), {"layers": "nobody.1,nobody.2"}, 404, "unknown_layer", "no layer of that name"),
        (("x",), {"layers": "a,,b"}, 422, "invalid_parameter", "names of layers, joined by commas"),
        (("x",), {"layers": ",".join("abcdefghi")}, 422, "invalid_parameter", "1 to 8 names"),
        (("x",), {"layers": "a", "eps": 1}, 422, "invalid_parameter", "eps belongs to the layer"),
    ],
)
def test_what_is_no_chain_is_refused(api, names, query, status, code, message):
    content = packed(**{name: torch.ones(2, 4) if name in ("x", "residual") else torch.ones(4) for name in names})
    refused = api.post(PATH, content=content, params=query, headers={"content-type": SAFETENSORS})
    assert_problem(refused, status, code)
    assert message in refused.json()["detail"]


def test_shapes_are_named(api, layers):
    content = packed(x=torch.ones(2, 4), **{"bias.3": torch.ones(5)})
    refused = api.post(PATH, content=content, headers={"content-type": SAFETENSORS})
    assert_problem(refused, 422, "invalid_shape")
    assert "x [2, 4] needs bias.3 [4], got [5]" in refused.json()["detail"]
    name = next(iter(layers))
    query = {"layers": f"{name},{name}"}
    refused = api.post(
        PATH, content=packed(x=torch.ones(2, 4)), params=query, headers={"content-type": SAFETENSORS}
    )
    assert_problem(refused, 422, "invalid_shape")
    assert "is for size 24, x has 4" in refused.json()["detail"]


def test_there_is_no_way_back_and_no_layer_of_a_chain(api):
    content, headers = packed(x=torch.ones(2, 4)), {"content-type": SAFETENSORS}
    assert api.post(f"{PATH}/backward", content=content, headers=headers).status_code == 404
    refused = api.put("/v1/layers/x", content=content, params={"op": "layer_norm_chain"}, headers=headers)
    assert_problem(refused, 422, "invalid_parameter")


def test_over_the_inference_protocol(server, layers, tensors):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    described = client.get_model_metadata("layer_norm_chain")
    assert [each["name"] for each in described["inputs"]][:3] == ["x", "weight.0", "bias.0"]
    assert [each["name"] for each in described["outputs"]] == ["y"]
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}

    def given(name: str) -> triton.InferInput:
        return triton.InferInput(name, list(arrays[name].shape), "FP32").set_data_from_numpy(arrays[name])

    got = client.infer("layer_norm_chain", [given(name) for name in arrays]).as_numpy("y")
    assert_right(torch.from_numpy(got.copy()), {name: torch.from_numpy(array) for name, array in arrays.items()})
    by_name = client.infer("layer_norm_chain", [given("x")], parameters={"layers": ",".join(layers)}).as_numpy("y")
    with Client(server.url) as plain:
        assert np.array_equal(by_name, plain.layer_norm_chain(arrays["x"], layers=list(layers)).y)


def test_through_both_clients(server, layers, tensors):
    weights = [tensors["weight.0"], None, tensors["weight.2"]]
    biases = (None, tensors["bias.1"])
    with Client(server.url) as client:
        result = client.layer_norm_chain(tensors["x"], weights, biases, eps=1e-4)
        assert_right(result.y, tensors, eps=1e-4)
        assert (result.mean, result.rstd, result.residual_out, result.scale) == (None,) * 4
        named = client.layer_norm_chain(tensors["x"], layers=tuple(layers), out_dtype=torch.float32)

    async def ask():
        async with AsyncClient(server.url) as client:
            return await client.layer_norm_chain(tensors["x"], layers=list(layers), out_dtype="float32")

    assert torch.equal(asyncio.run(ask()).y, named.y)
