"""NVIDIA's client of gRPC, unmodified: every operation and pass, and what else it asks of a server."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.integration.grpc.requests import make_input, make_inputs
from tests.integration.oip.models import (
    CASES,
    DATATYPES,
    NORM,
    assert_close,
    expected,
    parameters_of,
    random,
)

X = random(4, 8)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("op", CASES)
def test_forward(client, op, datatype):
    shape, channels, parameters, _ = CASES[op]
    given = {"x": random(*shape, datatype=datatype), **parameters_of(op, channels, datatype)}
    result = client.infer(op, make_inputs(given), parameters=parameters)
    assert_close(result, expected(op, given), datatype)
    assert [each.name for each in result.get_response().outputs] == ["y"]


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("op", CASES)
def test_backward(client, op, datatype):
    shape, channels, parameters, _ = CASES[op]
    given = {"x": random(*shape, datatype=datatype), **parameters_of(op, channels, datatype)}
    given["dy"] = random(*shape, datatype=datatype, seed=9)
    result = client.infer(f"{op}_backward", make_inputs(given), parameters=parameters)
    assert_close(result, expected(op, given), datatype)


def test_a_registered_layer(client, registered):
    weight, bias = NORM
    result = client.infer(registered, [make_input("x", X)])
    wanted = F.relu(F.layer_norm(torch.from_numpy(X), (8,), weight, bias, 1e-3))
    np.testing.assert_allclose(result.as_numpy("y"), wanted.numpy(), atol=1e-5)
    assert client.get_model_metadata(registered).inputs[0].shape == [-1, 8]


def test_outputs_come_in_the_order_that_is_asked_for(client):
    wanted = [triton.InferRequestedOutput(name) for name in ("rstd", "y", "mean")]
    result = client.infer("layer_norm", [make_input("x", X)], outputs=wanted, request_id="some id")
    response = result.get_response()
    assert ([each.name for each in response.outputs], response.id) == (["rstd", "y", "mean"], "some id")
    np.testing.assert_allclose(result.as_numpy("mean"), X.mean(1), atol=1e-6)


def test_large_tensors(client):
    x = random(4096, 1024)
    result = client.infer("layer_norm", [make_input("x", x)], parameters={"stats": True})
    np.testing.assert_allclose(result.as_numpy("mean"), x.mean(1), atol=1e-5)


def test_empty_tensors(client):
    assert client.infer("layer_norm", [make_input("x", random(0, 8))]).as_numpy("y").shape == (0, 8)


def test_typed_contents(client):
    given = triton.InferInput("x", [4, 8], "FP32")
    given._get_tensor().contents.fp32_contents.extend(X.ravel().tolist())
    got = client.infer("layer_norm", [given]).as_numpy("y")
    assert np.array_equal(got, client.infer("layer_norm", [make_input("x", X)]).as_numpy("y"))


def test_what_the_server_says_of_itself(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    metadata = client.get_server_metadata()
    assert metadata.name == "normserve"
    assert {"statistics", "model_repository", "system_shared_memory"} <= set(metadata.extensions)


def test_what_the_server_says_of_a_model(client):
    assert client.is_model_ready("layer_norm")
    assert client.is_model_ready("layer_norm", "1")
    assert not client.is_model_ready("layer_norm", "2")
    assert not client.is_model_ready("unheard of")
    metadata = client.get_model_metadata("layer_norm")
    assert (metadata.name, metadata.versions, metadata.inputs[0].name) == ("layer_norm", ["1"], "x")
    config = client.get_model_config("group_norm", as_json=True)["config"]
    assert config["name"] == "group_norm"
    assert config["input"][0]["data_type"] == "TYPE_FP32"


def test_statistics(client):
    before = client.get_inference_statistics("rms_norm", as_json=True)["model_stats"][0]
    client.infer("rms_norm", [make_input("x", X)])
    after = client.get_inference_statistics("rms_norm", as_json=True)["model_stats"][0]
    assert int(after["inference_count"]) == int(before.get("inference_count", 0)) + 1
    assert len(client.get_inference_statistics().model_stats) >= len(CASES)


def test_the_repository(client, registered):
    names = [each.name for each in client.get_model_repository_index().models]
    assert {"layer_norm", "layer_norm_backward", registered} <= set(names)
    client.load_model(registered)
    with pytest.raises(InferenceServerException, match="as it was registered"):
        client.load_model(registered, config="{}")
    client.unload_model(registered)
    assert not client.is_model_ready(registered)
    with pytest.raises(InferenceServerException, match="cannot be unloaded"):
        client.unload_model("layer_norm")


@pytest.mark.parametrize(
    ("model", "parameters", "status"),
    [
        ("unheard of", {}, "NOT_FOUND"),
        ("layer_norm", {"epsilon": 1.0}, "INVALID_ARGUMENT"),
        ("layer_norm", {"eps": -1.0}, "INVALID_ARGUMENT"),
    ],
)
def test_errors_have_statuses(client, model, parameters, status):
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, [make_input("x", X)], parameters=parameters)
    assert caught.value.status() == f"StatusCode.{status}"


def test_a_deadline_is_the_clients_own(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("layer_norm", [make_input("x", random(4096, 1024))], client_timeout=0.001)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert client.infer("layer_norm", [make_input("x", X)]).as_numpy("y") is not None


def test_compressed_messages(client):
    for algorithm in ("gzip", "deflate"):
        result = client.infer("layer_norm", [make_input("x", X)], compression_algorithm=algorithm)
        assert result.as_numpy("y").shape == X.shape


def test_calls_are_counted_as_those_of_grpc(client, speaking):
    client.infer("layer_norm", [make_input("x", X)])
    with speaking.client() as api:
        counted = api.get("/metrics").text
    labels = 'op="layer_norm",pass="forward",dtype="float32",transport="grpc",code="200"'
    assert f"normserve_requests_total{{{labels}}}" in counted
