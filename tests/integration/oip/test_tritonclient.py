"""NVIDIA's client, unmodified: every operation and pass, and what else it asks of a server."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import tritonclient.http as triton
from gevent import monkey
from tritonclient.utils import InferenceServerException

from tests.integration.oip.models import (
    CASES,
    DATATYPES,
    NORM,
    assert_close,
    expected,
    parameters_of,
    random,
    tensor,
    tensors,
)

X = random(4, 8)


def test_the_client_patches_nothing_of_this_process():
    assert not monkey.saved


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("op", CASES)
def test_forward(client, op, datatype):
    shape, channels, parameters, _ = CASES[op]
    given = {"x": random(*shape, datatype=datatype), **parameters_of(op, channels, datatype)}
    result = client.infer(op, tensors(given), parameters=parameters)
    assert_close(result, expected(op, given), datatype)
    assert [each["name"] for each in result.get_response()["outputs"]] == ["y"]


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("op", CASES)
def test_backward(client, op, datatype):
    shape, channels, parameters, _ = CASES[op]
    given = {"x": random(*shape, datatype=datatype), **parameters_of(op, channels, datatype)}
    given["dy"] = random(*shape, datatype=datatype, seed=9)
    result = client.infer(f"{op}_backward", tensors(given), parameters=parameters)
    assert_close(result, expected(op, given), datatype)


@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
def test_tensors_in_json_both_ways(client, datatype):
    given = {"x": random(5, 33, datatype=datatype), **parameters_of("layer_norm", 33, datatype)}
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    result = client.infer("layer_norm", tensors(given, binary=False), outputs=wanted)
    (output,) = result.get_response()["outputs"]
    assert output.keys() == {"name", "datatype", "shape", "data"}
    as_binary = client.infer("layer_norm", tensors(given))
    assert np.array_equal(result.as_numpy("y"), as_binary.as_numpy("y"))


def test_bfloat16_comes_as_json_where_it_is_asked_for(client):
    given = [tensor("x", random(4, 8, datatype="BF16"))]
    in_json = client.infer("layer_norm", given, outputs=[triton.InferRequestedOutput("y", binary_data=False)])
    assert np.array_equal(in_json.as_numpy("y"), client.infer("layer_norm", given).as_numpy("y"))


def test_outputs_come_in_the_order_and_the_form_that_is_asked_for(client):
    wanted = [
        triton.InferRequestedOutput("rstd"),
        triton.InferRequestedOutput("y", binary_data=False),
        triton.InferRequestedOutput("mean"),
    ]
    result = client.infer("layer_norm", [tensor("x", X)], outputs=wanted)
    outputs = result.get_response()["outputs"]
    assert [each["name"] for each in outputs] == ["rstd", "y", "mean"]
    assert ["data" in each for each in outputs] == [False, True, False]
    np.testing.assert_allclose(result.as_numpy("mean"), X.mean(1), atol=1e-6)
    np.testing.assert_allclose(result.as_numpy("rstd"), 1 / np.sqrt(X.var(1) + 1e-5), rtol=1e-5)


def test_without_outputs_all_come(client):
    given = {"x": X, "residual": random(4, 8, seed=3)}
    result = client.infer("layer_norm", tensors(given), parameters={"stats": True})
    assert [each["name"] for each in result.get_response()["outputs"]] == ["y", "residual_out", "mean", "rstd"]
    np.testing.assert_allclose(result.as_numpy("residual_out"), X + given["residual"], atol=1e-6)


def test_parameters_are_those_of_the_operation(client):
    said = {"eps": 0.5, "activation": "silu", "dropout": 0.25, "seed": -(2**62), "out_dtype": "float16"}
    first, again = (client.infer("layer_norm", [tensor("x", X)], parameters=said) for _ in range(2))
    assert np.array_equal(first.as_numpy("y"), again.as_numpy("y"))
    assert first.as_numpy("y").dtype == np.float16
    assert (first.as_numpy("y") == 0).any()
    plain = client.infer("layer_norm", [tensor("x", X)], parameters={"eps": 0.5, "activation": "silu"})
    wanted = F.silu(F.layer_norm(torch.from_numpy(X), (8,), eps=0.5))
    np.testing.assert_allclose(plain.as_numpy("y"), wanted, atol=1e-5)


def test_channels_may_come_last(client):
    x = random(2, 6, 4, 5)
    first = client.infer("group_norm", [tensor("x", x)], parameters={"num_groups": 3})
    last = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    said = {"num_groups": 3, "layout": "nhwc"}
    y = client.infer("group_norm", [tensor("x", last)], parameters=said).as_numpy("y")
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), first.as_numpy("y"), atol=1e-5)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms_over_channels(client, op):
    x = random(2, 6, 4, 5)
    last = client.infer(op, [tensor("x", np.ascontiguousarray(np.moveaxis(x, 1, -1)))])
    first = client.infer(op, [tensor("x", x)], parameters={"layout": "nchw", "stats": True})
    np.testing.assert_array_equal(np.moveaxis(first.as_numpy("y"), 1, -1), last.as_numpy("y"))
    assert first.as_numpy("rstd").shape == (2, 4, 5)
    given = tensors({"x": x, "dy": x, "weight": np.ones(6, np.float32)})
    gradients = client.infer(f"{op}_backward", given, parameters={"layout": "nchw"})
    assert gradients.as_numpy("dx").shape == x.shape
    assert gradients.as_numpy("dweight").shape == (6,)


def test_a_registered_layer_is_a_model(client, registered):
    weight, bias = NORM
    wanted = F.relu(F.layer_norm(torch.from_numpy(X), (8,), weight, bias, 1e-3)).numpy()
    for version in ("", "1"):
        y = client.infer(registered, [tensor("x", X)], model_version=version).as_numpy("y")
        np.testing.assert_allclose(y, wanted, atol=1e-5)
    assert client.is_model_ready(registered)
    told = client.get_model_metadata(registered, "1")
    assert told["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 8]}
    assert [each["name"] for each in told["inputs"]] == ["x", "scale", "shift", "gate", "residual"]


def test_gradients_of_a_registered_layer(client, registered):
    result = client.infer(
        "layer_norm_backward", tensors({"x": X, "dy": X}), parameters={"layer": registered}, model_version="1"
    )
    assert result.as_numpy("dweight").shape == result.as_numpy("dbias").shape == (8,)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (8,)])
def test_shapes_at_the_edge(client, shape):
    x = random(*shape)
    result = client.infer("layer_norm", [tensor("x", x)])
    assert result.as_numpy("y").shape == shape
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]
    assert client.infer("layer_norm", [tensor("x", x)], outputs=wanted).as_numpy("y").shape == shape


def test_nan_and_infinity_are_data(client):
    x = X.copy()
    x[0, 0], x[1, 0] = np.nan, np.inf
    y = client.infer("layer_norm", [tensor("x", x)]).as_numpy("y")
    assert np.isnan(y[:2]).all()
    assert np.isfinite(y[2:]).all()
    with pytest.raises(InferenceServerException, match="binary") as told:
        client.infer("layer_norm", [tensor("x", x)], outputs=[triton.InferRequestedOutput("y", binary_data=False)])
    assert told.value.status() == "406"


def test_many_requests_at_once(server):
    address = server.url.removeprefix("http://")
    with triton.InferenceServerClient(address, concurrency=4) as client:
        xs = [random(4, 8, seed=seed) for seed in range(16)]
        handles = [client.async_infer("layer_norm", [tensor("x", x)], request_id=str(n)) for n, x in enumerate(xs)]
        for number, (x, handle) in enumerate(zip(xs, handles, strict=True)):
            result = handle.get_result()
            assert result.get_response()["id"] == str(number)
            assert_close(result, expected_plain(x), "FP32")


def expected_plain(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": F.layer_norm(torch.from_numpy(x).double(), (8,)).numpy()}


def test_a_large_tensor(client):
    x = random(2048, 1024)
    assert_close(
        client.infer("rms_norm", [tensor("x", x)]), {"y": x / np.sqrt((x**2).mean(1, keepdims=True))}, "FP32"
    )


def test_a_body_that_its_client_made_itself(client):
    """`generate_request_body` and `parse_response_body`, which other HTTP libraries are used with."""
    body, length = triton.InferenceServerClient.generate_request_body([tensor("x", X)], request_id="mine")
    assert json.loads(body[:length])["id"] == "mine"
    response = client._post("v2/models/layer_norm/infer", body, {"Inference-Header-Content-Length": length}, None)
    length = int(response.get("Inference-Header-Content-Length"))
    assert response.get("Content-Type") == "application/octet-stream"
    assert response.get("Server-Timing").startswith("recv;dur=")
    result = triton.InferenceServerClient.parse_response_body(response.read(), header_length=length)
    assert_close(result, expected_plain(X), "FP32")


def test_what_the_server_says_of_itself(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    told = client.get_server_metadata()
    assert told["name"] == "normserve"
    assert {"binary_tensor_data", "statistics", "model_repository", "model_configuration", "parameters"} <= set(
        told["extensions"]
    )


@pytest.mark.parametrize("model", [f"{op}{way}" for op in CASES for way in ("", "_backward")])
def test_each_operation_describes_itself(client, model):
    assert client.is_model_ready(model, "1")
    told = client.get_model_metadata(model)
    assert (told["name"], told["versions"], told["platform"]) == (model, ["1"], "normserve")
    assert told["inputs"][0]["name"] == "x"
    config = client.get_model_config(model)
    assert config["max_batch_size"] == 0
    assert [each["name"] for each in config["input"]] == [each["name"] for each in told["inputs"]]
    required = {each["name"] for each in config["input"] if not each["optional"]}
    assert required == ({"x", "dy"} if model.endswith("_backward") else {"x"})
    assert [each["dims"] for each in config["output"]] == [each["shape"] for each in told["outputs"]]


def test_the_repository(client, registered):
    index = client.get_model_repository_index()
    assert {"name": registered, "version": "1", "state": "READY", "reason": ""} in index
    assert {"layer_norm", "rms_norm_backward"} <= {each["name"] for each in index}
    client.load_model(registered)
    client.unload_model(registered)
    assert registered not in {each["name"] for each in client.get_model_repository_index()}
    assert not client.is_model_ready(registered)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda client: client.load_model("nobody"), "404"),
        (lambda client: client.load_model("layer_norm", config="{}"), "422"),
        (lambda client: client.unload_model("layer_norm"), "400"),
        (lambda client: client.unload_model("nobody"), "404"),
        (lambda client: client.get_model_metadata("nobody"), "404"),
        (lambda client: client.get_model_config("layer_norm", "2"), "404"),
        (lambda client: client.get_inference_statistics("nobody"), "404"),
        (lambda client: client.get_trace_settings(), "404"),
        (lambda client: client.get_log_settings(), "404"),
    ],
)
def test_what_cannot_be_is_an_exception_with_a_reason(client, call, status):
    with pytest.raises(InferenceServerException) as told:
        call(client)
    assert told.value.status() == status
    assert "exception occurred in the client" not in told.value.message()


INFERRED = [
    ({"parameters": {"epz": 1}}, "422", "closest is 'eps'"),
    ({"parameters": {"eps": -1}}, "422", "eps must be"),
    ({"parameters": {"timeout_ms": 5}}, "422", "closest is 'timeout'"),
    ({"priority": 3}, "422", "'priority' is not a parameter"),
    ({"sequence_id": 7}, "422", "'sequence_id' is not a parameter"),
    ({"outputs": [triton.InferRequestedOutput("z")]}, "422", "expected y"),
    ({"outputs": [triton.InferRequestedOutput("residual_out")]}, "422", "these inputs give y, and nothing"),
    ({"outputs": [triton.InferRequestedOutput("y", class_count=3)]}, "422", "classification"),
    ({"outputs": [triton.InferRequestedOutput("y"), triton.InferRequestedOutput("y")]}, "400", "name of its own"),
    ({"request_compression_algorithm": "gzip"}, "415", "Content-Encoding"),
    ({"request_compression_algorithm": "deflate"}, "415", "Content-Encoding"),
    ({"model_version": "2"}, "404", "version 1"),
]


@pytest.mark.parametrize(("options", "status", "said"), INFERRED, ids=lambda each: str(each)[:40])
def test_a_refused_inference_is_an_exception_with_a_reason(client, options, status, said):
    with pytest.raises(InferenceServerException, match=said) as told:
        client.infer("layer_norm", [tensor("x", X)], **options)
    assert told.value.status() == status


def test_a_response_may_be_asked_for_compressed_and_comes_as_it_is(client):
    result = client.infer("layer_norm", [tensor("x", X)], response_compression_algorithm="gzip")
    assert_close(result, expected_plain(X), "FP32")


def test_a_timeout_is_kept(client):
    """A microsecond is over before anything can begin."""
    with pytest.raises(InferenceServerException) as told:
        client.infer("layer_norm", [tensor("x", X)], timeout=1)
    assert told.value.status() == "504"
    client.infer("layer_norm", [tensor("x", X)], timeout=10_000_000)


def test_requests_are_counted_as_those_of_this_protocol(client, api):
    client.infer("layer_norm", [tensor("x", X)])
    text = api.get("/metrics").text
    series = 'normserve_requests_total{op="layer_norm",pass="forward",dtype="float32",transport="oip",code="200"}'
    assert series in text
