"""Several tensors that share parameters in one request: the bits that one tensor of all rows has."""

import asyncio

import numpy as np
import pytest
import torch
from normserve.client import AsyncClient, Client, InvalidRequestError
from tritonclient import http as triton

from tests.integration.api.operations.cases import post
from tests.integration.harness.wire import NPY, SAFETENSORS, assert_problem, packed, unpacked

ROWS = (3, 1, 4)
SHAPES = {"layer_norm": (2, 24), "rms_norm": (24,), "group_norm": (8, 5)}


def parts(op: str, seed: int = 0, count: int = len(ROWS)) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS[n % len(ROWS)], *SHAPES[op], generator=numbers).bfloat16() for n in range(count)]


def parameters(op: str) -> dict[str, torch.Tensor]:
    size = SHAPES[op][0 if op == "group_norm" else -1]
    names = ("weight",) if op == "rms_norm" else ("weight", "bias")
    return {name: torch.randn(size, generator=torch.Generator().manual_seed(len(name))) for name in names}


def named(name: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.{number}": tensor for number, tensor in enumerate(tensors)}


@pytest.fixture
def query(op):
    return {"activation": "silu"} | ({"num_groups": 4} if op == "group_norm" else {})


@pytest.fixture(params=SHAPES)
def op(request):
    return request.param


def assert_divided(got: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], count: int = len(ROWS)) -> None:
    """Numbered results are the pieces of one; what is a sum over all is that of all rows."""
    sums = {"dweight", "dbias"}
    assert got.keys() == {f"{name}.{n}" for name in whole.keys() - sums for n in range(count)} | whole.keys() & sums
    for name, tensor in whole.items():
        pieces = tensor if name in sums else torch.cat([got[f"{name}.{n}"] for n in range(count)])
        assert torch.equal(got[name] if name in sums else pieces, tensor), name


def test_both_passes_have_the_bits_of_one_tensor(api, op, query):
    x, residual, dy = (parts(op, seed) for seed in range(3))
    sent = named("x", x) | named("residual", residual) | parameters(op)
    one = {"x": torch.cat(x), "residual": torch.cat(residual)} | parameters(op)
    response = api.post(
        f"/v1/{op}", content=packed(**sent), params=query | {"stats": 1}, headers={"content-type": SAFETENSORS}
    )
    assert response.status_code == 200, response.text
    got, whole = unpacked(response.content), post(api, f"/v1/{op}", packed(**one), stats=1, **query)
    assert_divided(got, whole)
    assert int(response.headers["x-kernel-bytes"]) == 4 * 2 * one["x"].numel()
    saved = {name: tensor for name, tensor in whole.items() if name in ("mean", "rstd")}
    sent |= named("dy", dy) | {name: each for name, each in got.items() if name.partition(".")[0] in saved}
    back = post(api, f"/v1/{op}/backward", packed(**sent), **query)
    assert_divided(back, post(api, f"/v1/{op}/backward", packed(**one, **saved, dy=torch.cat(dy)), **query))


def test_more_than_ten_in_the_order_of_their_names(api):
    x = parts("rms_norm", count=12)
    got = post(api, "/v1/rms_norm", packed(**named("x", x)))
    assert_divided(got, post(api, "/v1/rms_norm", packed(x=torch.cat(x))), count=12)


def test_a_chain_and_a_registered_layer(api):
    x, weight = parts("layer_norm"), torch.randn(24)
    chained = {"weight.0": weight, "weight.1": weight + 1}
    got = post(api, "/v1/layer_norm_chain", packed(**named("x", x), **chained))
    assert_divided(got, post(api, "/v1/layer_norm_chain", packed(x=torch.cat(x), **chained)))
    headers = {"content-type": SAFETENSORS}
    api.put("/v1/layers/several", content=packed(weight=weight), params={"op": "layer_norm"}, headers=headers)
    got = post(api, "/v1/layer_norm", packed(**named("x", x)), layer="several")
    assert_divided(got, post(api, "/v1/layer_norm", packed(x=torch.cat(x)), layer="several"))
    got = post(api, "/v1/layer_norm", packed(**named("x", x)), layer="several", out_dtype="float8_e4m3fn")
    assert got.keys() == {f"{name}.{n}" for name in ("y", "scale") for n in range(3)}


def test_npy_holds_one_tensor(api):
    headers = {"content-type": SAFETENSORS, "accept": NPY}
    refused = api.post("/v1/layer_norm", content=packed(**named("x", [torch.ones(2, 4)])), headers=headers)
    assert_problem(refused, 406, "not_acceptable")
    assert "npy holds one tensor" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("tensors", "code", "message"),
    [
        ({"x.0": (2, 4), "x.2": (2, 4)}, "missing_tensor", "x.1 is missing, although x.2 was sent"),
        ({"x": (2, 4), "x.0": (2, 4)}, "unexpected_tensor", "got 'x.0'"),
        ({"x.1": (2, 4)}, "unexpected_tensor", "got 'x.1'"),
        ({"x.0": (2, 4), "x.1": (2, 5)}, "invalid_shape", "x.1 must be [2, 4], got [2, 5]"),
        ({"x.0": (4, 4), "weight": (5,)}, "invalid_shape", "x [4, 4] needs weight [4], got [5]"),
    ],
)
def test_what_does_not_fit_is_refused(api, tensors, code, message):
    content = packed(**{name: torch.ones(shape) for name, shape in tensors.items()})
    refused = api.post("/v1/layer_norm", content=content, headers={"content-type": SAFETENSORS})
    assert_problem(refused, 422, code)
    assert message in refused.json()["detail"]


def test_over_the_inference_protocol(server):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    arrays = [
        np.random.default_rng(n).standard_normal((rows, 24)).astype(np.float32) for n, rows in enumerate(ROWS)
    ]

    def given(name: str, array: np.ndarray) -> triton.InferInput:
        return triton.InferInput(name, list(array.shape), "FP32").set_data_from_numpy(array)

    whole = client.infer("layer_norm", [given("x", np.concatenate(arrays))]).as_numpy("y")
    inputs = [given(f"x.{n}", array) for n, array in enumerate(arrays)]
    for asked in (None, [triton.InferRequestedOutput(f"y.{n}") for n in range(3)]):
        result = client.infer("layer_norm", inputs, outputs=asked)
        assert [each["name"] for each in result.get_response()["outputs"]] == ["y.0", "y.1", "y.2"]
        assert np.array_equal(np.concatenate([result.as_numpy(f"y.{n}") for n in range(3)]), whole)
    with pytest.raises(triton.InferenceServerException, match=r"give y\.0, y\.1, y\.2, and nothing"):
        client.infer("layer_norm", inputs, outputs=[triton.InferRequestedOutput("y")])


@pytest.fixture(params=["http", "shared memory"])
def url(request, launched, tmp_path, server):
    if request.param == "http":
        return server.url
    path = tmp_path / "normserve.sock"
    launched("--local", str(path))
    return f"unix://{path}"


def test_through_the_clients(url, op, query):
    x, residual, dy = (parts(op, seed) for seed in range(3))
    affine = parameters(op)
    with Client(url) as client:
        forward, backward = getattr(client, op), getattr(client, f"{op}_backward")
        got = forward(x, **affine, residual=tuple(residual), stats=True, **query)
        whole = forward(torch.cat(x), **affine, residual=torch.cat(residual), stats=True, **query)
        for name in ("y", "residual_out", "mean", "rstd"):
            if getattr(whole, name) is not None:
                assert isinstance(getattr(got, name), list)
                assert torch.equal(torch.cat(getattr(got, name)), getattr(whole, name)), name
        gradients = backward(dy, x, **affine, residual=residual, rstd=None, **query)
        of_whole = backward(torch.cat(dy), torch.cat(x), **affine, residual=torch.cat(residual), **query)
        assert torch.equal(torch.cat(gradients.dx), of_whole.dx)
        assert torch.equal(gradients.dweight, of_whole.dweight)
        with pytest.raises((ValueError, InvalidRequestError), match=r"x\.1"):
            forward([x[0], x[1][..., :2]], **query)

    async def ask():
        async with AsyncClient(url) as client:
            return await getattr(client, op)(x, **affine, **query)

    arrays = [tensor.float().numpy() for tensor in x]
    with Client(url) as client:
        plain = getattr(client, op)(arrays, **query).y
        assert [array.shape for array in plain] == [array.shape for array in arrays]
        assert isinstance(plain[0], np.ndarray)
    y = asyncio.run(ask()).y
    with Client(url) as client:
        assert torch.equal(torch.cat(y), getattr(client, op)(torch.cat(x), **affine, **query).y)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "shapes", [[(2, 3, 16), (1, 3, 16)], [(1, 16), (2, 16)]], ids=["of-tokens", "joined-to-heads"]
)
def test_a_client_reads_gradients_of_a_layer_with_parameters_of_each_head(server, op, shapes):
    x = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    parameters = [torch.randn(3, 16) for _ in range(2 if op == "layer_norm" else 1)]
    with Client(server.url) as client:
        client.put_layer("several.heads", op, *parameters)
        backward = getattr(client, f"{op}_backward")
        got = backward(x, x, layer="several.heads")
        right = backward(torch.cat(x), torch.cat(x), layer="several.heads")
        client.delete_layer("several.heads")
    assert torch.equal(torch.cat(got.dx), right.dx)
    for name in ("dweight", "dbias")[: len(parameters)]:
        assert getattr(got, name).shape == (3, 16)
        assert torch.equal(getattr(got, name), getattr(right, name))
