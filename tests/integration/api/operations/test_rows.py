"""What rows alone take: an offset of weight, a residual of its own type, parameters of each head; over HTTP."""

import asyncio
import uuid

import pytest
import torch
from fusednorm import reference
from normserve.client import AsyncClient, Client

from tests.integration.api.operations.cases import assert_close, default_eps, post
from tests.integration.harness.wire import SAFETENSORS, assert_problem, packed

OPS = ("layer_norm", "rms_norm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(13)


def given(op: str, shape: tuple[int, ...], of: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> dict:
    tensors = {"x": torch.randn(shape).to(dtype), "weight": torch.randn(of).to(dtype)}
    return tensors | ({"bias": torch.randn(of)} if op == "layer_norm" else {})


def right(op: str, direction: str, tensors: dict[str, torch.Tensor], **options: object) -> dict[str, torch.Tensor]:
    """The oracle's answer; one tensor that is the gradient of x and of the residual comes once."""
    tensors = dict(tensors)
    leading = [tensors.pop(name) for name in (("x",) if direction == "forward" else ("dy", "x"))]
    options = {"eps": default_eps(op), "precision": torch.float64} | options
    found = getattr(reference, f"{op}_{direction}")(*leading, **tensors, **options)._asdict()
    if found.get("dresidual") is not None and found["dresidual"].dtype == found["dx"].dtype:
        del found["dresidual"]
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("of", [(48,), (3, 48)], ids=["common", "heads"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_both_passes(api, op, of, stream):
    tensors = given(op, (2, 3, 48), of)
    tensors["residual"] = torch.randn(2, 3, 48).to(stream)
    query = {"weight_offset": 1, "activation": "silu"}
    forward = post(api, f"/v1/{op}", packed(**tensors), stats=1, **query)
    assert forward["residual_out"].dtype == stream
    assert_close(forward, right(op, "forward", tensors, stats=True, **query))
    saved = {name: forward[name] for name in ("mean", "rstd") if name in forward}
    tensors |= {"dy": torch.randn(2, 3, 48).bfloat16(), "dresidual_out": torch.randn(2, 3, 48).to(stream)}
    backward = post(api, f"/v1/{op}/backward", packed(**tensors, **saved), **query)
    assert ("dresidual" in backward) == (stream is torch.float32)
    assert_close(backward, right(op, "backward", tensors, **query))


@pytest.mark.parametrize("op", OPS)
def test_a_slope_and_another_one(api, op):
    tensors = given(op, (6, 48), (48,), torch.float32)
    for slope in (0.25, -0.75):
        query = {"activation": "leaky_relu", "negative_slope": slope}
        assert_close(post(api, f"/v1/{op}", packed(**tensors), **query), right(op, "forward", tensors, **query))
        sent = tensors | {"dy": torch.randn(6, 48)}
        backward = post(api, f"/v1/{op}/backward", packed(**sent), **query)
        assert_close(backward, right(op, "backward", sent, **query))


@pytest.mark.parametrize("op", OPS)
def test_a_layer_has_heads_and_an_offset(api, op):
    name = f"heads.{uuid.uuid4().hex}"
    tensors = given(op, (4, 3, 16), (3, 16))
    parameters = {key: tensor.bfloat16() for key, tensor in tensors.items() if key != "x"}
    path = f"/v1/layers/{name}"
    asked = {"op": op, "weight_offset": 1}
    made = api.put(path, content=packed(**parameters), params=asked, headers={"content-type": SAFETENSORS})
    assert made.status_code == 201, made.text
    assert (made.json()["size"], made.json()["heads"], made.json()["weight_offset"]) == (16, 3, 1.0)
    tensors |= parameters
    sent = {"x": tensors["x"]}
    got = post(api, f"/v1/{op}", packed(**sent), layer=name)
    assert_close(got, right(op, "forward", tensors, weight_offset=1))
    sent["dy"] = torch.randn(4, 3, 16).bfloat16()
    got = post(api, f"/v1/{op}/backward", packed(**sent), layer=name)
    assert_close(got, right(op, "backward", tensors | sent, weight_offset=1))
    raw = torch.randn(4, 3, 16)
    inferred = api.post(
        f"/v2/models/{name}/infer", content=raw.numpy().tobytes(), headers={"inference-header-content-length": "0"}
    )
    assert inferred.status_code == 200, inferred.text
    described = api.get(f"/v2/models/{name}").json()
    assert described["inputs"][0] == {"name": "x", "datatype": "BF16", "shape": [-1, 3, 16]}
    refused = api.post(f"/v1/{op}", content=packed(**sent), params={"layer": name, "weight_offset": 1})
    assert_problem(refused, 422, "invalid_parameter")
    api.delete(path)


@pytest.mark.parametrize(
    ("tensors", "path", "expected"),
    [
        # x and y of 2 bytes an element, the residual and its sum of 4.
        ({"x": 2, "residual": 4}, "/v1/layer_norm", 24 * (2 + 2 + 4 + 4)),
        # dy, x, dx of 2 bytes, the residual and its gradient of 4.
        ({"x": 2, "dy": 2, "residual": 4}, "/v1/rms_norm/backward", 24 * (2 + 2 + 2 + 4 + 4)),
    ],
)
def test_kernel_bytes_count_the_residuals_own_type(api, tensors, path, expected):
    dtypes = {2: torch.float16, 4: torch.float32}
    content = packed(**{name: torch.ones(2, 12, dtype=dtypes[size]) for name, size in tensors.items()})
    response = api.post(path, content=content, headers={"content-type": SAFETENSORS})
    assert int(response.headers["x-kernel-bytes"]) == expected


@pytest.mark.parametrize(
    ("path", "tensors", "query", "code"),
    [
        ("/v1/layer_norm", {"x": (2, 4)}, {"weight_offset": 1}, "missing_tensor"),
        ("/v1/layer_norm", {"x": (2, 4), "weight": (4,)}, {"weight_offset": 0.5}, "invalid_parameter"),
        ("/v1/layer_norm", {"x": (2, 4)}, {"activation": "silu", "negative_slope": 0.5}, "invalid_parameter"),
        ("/v1/group_norm", {"x": (2, 4)}, {"num_groups": 2, "weight_offset": 1}, "invalid_parameter"),
        ("/v1/group_norm", {"x": (2, 4), "weight": (2, 4)}, {"num_groups": 2}, "invalid_shape"),
        ("/v1/rms_norm", {"x": (2, 4), "weight": (3, 4)}, {}, "invalid_shape"),
    ],
)
def test_what_makes_no_sense_is_refused(api, path, tensors, query, code):
    content = packed(**{name: torch.ones(shape) for name, shape in tensors.items()})
    response = api.post(path, content=content, params=query, headers={"content-type": SAFETENSORS})
    assert_problem(response, 422, code)


@pytest.mark.parametrize("op", OPS)
def test_no_rows_have_empty_results_of_these_types(api, op):
    tensors = {"x": torch.empty(0, 3, 8).half(), "residual": torch.empty(0, 3, 8), "weight": torch.ones(3, 8)}
    forward = post(api, f"/v1/{op}", packed(**tensors), stats=1)
    assert (forward["residual_out"].dtype, forward["residual_out"].shape) == (torch.float32, (0, 3, 8))
    assert forward["rstd"].shape == (0, 3)
    backward = post(api, f"/v1/{op}/backward", packed(**tensors, dy=tensors["x"]))
    assert (backward["dresidual"].dtype, backward["dresidual"].shape) == (torch.float32, (0, 3, 8))
    assert backward["dweight"].shape == (3, 8)


def arguments() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    tensors = given("rms_norm", (2, 3, 16), (3, 16))
    return tensors, {"residual": torch.randn(2, 3, 16), "weight_offset": 1}


def check(tensors, asked, forward, backward, dy) -> None:
    options = {"weight_offset": 1, "residual": asked["residual"]}
    want = right("rms_norm", "forward", tensors, **options)
    assert_close({"y": forward.y, "residual_out": forward.residual_out}, want)
    want = right("rms_norm", "backward", tensors | {"dy": dy}, **options)
    assert_close({name: getattr(backward, name) for name in ("dx", "dresidual", "dweight")}, want)


def test_the_client_has_all_of_it(server):
    tensors, asked = arguments()
    dy = torch.randn(2, 3, 16).bfloat16()
    with Client(server.url) as client:
        forward = client.rms_norm(**tensors, **asked)
        check(tensors, asked, forward, client.rms_norm_backward(dy, **tensors, **asked), dy)
        name = f"client.{uuid.uuid4().hex}"
        assert client.put_layer(name, "rms_norm", tensors["weight"], weight_offset=1)
        assert torch.equal(
            client.rms_norm(tensors["x"], layer=name).y, client.rms_norm(**tensors, weight_offset=1).y
        )
        client.delete_layer(name)


def test_so_has_the_asynchronous_client(server):
    tensors, asked = arguments()
    dy = torch.randn(2, 3, 16).bfloat16()

    async def both():
        async with AsyncClient(server.url) as client:
            forward = await client.rms_norm(**tensors, **asked)
            return forward, await client.rms_norm_backward(dy, **tensors, **asked)

    check(tensors, asked, *asyncio.run(both()), dy)
