"""Requests become JSON and binary tensors, and responses messages."""

import json

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as triton
from normserve.client.responses.api_response import ApiResponse
from normserve.grpc.inference_messages import convert_request, convert_response
from normserve.grpc.statuses import CallError, Code

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def make_request(**fields):
    return triton.ModelInferRequest(model_name="layer_norm", **fields)


def add_input(request, name="x", datatype="FP32", shape=(2, 3), raw=None):
    made = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return made


def converted(request):
    made = convert_request(request.SerializeToString())
    return made, json.loads(made.json)


def test_a_request_has_its_tensors_after_the_json():
    request = make_request(id="7", model_version="1")
    add_input(request, raw=X.tobytes())
    request.outputs.add(name="y")
    request.parameters["eps"].double_param = 0.5
    request.parameters["num_groups"].int64_param = 4
    request.parameters["activation"].string_param = "relu"
    request.parameters["stats"].bool_param = True
    made, document = converted(request)
    assert made.path == "/v2/models/layer_norm/versions/1/infer"
    assert [bytes(each) for each in made.tensors] == [X.tobytes()]
    assert document == {
        "id": "7",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}],
        "outputs": [{"name": "y", "parameters": {}}],
        "parameters": {
            "eps": 0.5,
            "num_groups": 4,
            "activation": "relu",
            "stats": True,
            "binary_data_output": True,
        },
    }


def test_typed_contents_become_bytes():
    request = make_request()
    add_input(request).contents.fp32_contents.extend(X.ravel().tolist())
    made, _ = converted(request)
    assert made.tensors == [X.tobytes()]


def test_inputs_in_shared_memory_have_no_raw_contents():
    request = make_request()
    region = add_input(request, "residual")
    region.parameters["shared_memory_region"].string_param = "one"
    region.parameters["shared_memory_byte_size"].int64_param = 24
    add_input(request, raw=b"x" * 24)
    made, document = converted(request)
    assert [bytes(each) for each in made.tensors] == [b"x" * 24]
    assert [each["parameters"] for each in document["inputs"]] == [
        {"shared_memory_region": "one", "shared_memory_byte_size": 24},
        {"binary_data_size": 24},
    ]


def test_a_models_name_cannot_change_the_path():
    request = make_request()
    request.model_name = "a/b?c=../d e"
    made, _ = converted(request)
    assert made.path == "/v2/models/a%2Fb%3Fc%3D..%2Fd%20e/infer"


def fault_no_content(request):
    add_input(request)


def fault_more_raw_than_inputs(request):
    add_input(request, raw=b"1" * 24)
    request.raw_input_contents.append(b"2")


def fault_contents_and_raw(request):
    add_input(request, raw=b"1" * 24).contents.fp32_contents.append(1)


def fault_contents_of_another_type(request):
    add_input(request).contents.fp64_contents.append(1)


def fault_contents_of_half_precision(request):
    add_input(request, datatype="FP16").contents.fp32_contents.append(1)


def fault_parameter_without_value(request):
    add_input(request, raw=b"1" * 24)
    request.parameters["eps"].SetInParent()
    request.parameters["eps"].CopyFrom(triton.InferParameter())


def fault_no_model(request):
    add_input(request, raw=b"1" * 24)
    request.model_name = ""


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_parameter_that_json_cannot_represent_is_refused_by_its_name(value):
    request = make_request()
    add_input(request, raw=b"1" * 24)
    request.parameters["eps"].double_param = float(value)
    with pytest.raises(CallError, match=f"'eps' must be finite, got {value}"):
        convert_request(request.SerializeToString())


@pytest.mark.parametrize(
    "break_request",
    [
        fault_no_content,
        fault_more_raw_than_inputs,
        fault_contents_and_raw,
        fault_contents_of_another_type,
        fault_contents_of_half_precision,
        fault_parameter_without_value,
        fault_no_model,
    ],
)
def test_an_input_must_have_one_source(break_request):
    request = make_request()
    break_request(request)
    with pytest.raises(CallError) as caught:
        convert_request(request.SerializeToString())
    assert caught.value.code is Code.INVALID_ARGUMENT


def make_response(outputs, tail=b""):
    document = {"model_name": "layer_norm", "model_version": "1", "id": "7", "outputs": outputs}
    text = json.dumps(document).encode()
    return ApiResponse(200, {"inference-header-content-length": str(len(text))}, memoryview(text + tail))


def test_a_response_has_raw_bytes_for_every_output():
    region = {"shared_memory_region": "one", "shared_memory_offset": 8, "shared_memory_byte_size": 24}
    head, tensors = convert_response(
        make_response(
            [
                {"name": "mean", "datatype": "FP32", "shape": [1], "parameters": region},
                {"name": "y", "datatype": "BF16", "shape": [2], "parameters": {"binary_data_size": 4}},
            ],
            b"abcd",
        )
    )
    assert [bytes(each) for each in tensors] == [b"", b"abcd"]
    response = triton.ModelInferResponse.FromString(head)
    assert (response.id, [each.datatype for each in response.outputs]) == ("7", ["FP32", "BF16"])
    assert response.outputs[0].parameters["shared_memory_offset"].int64_param == 8


@pytest.mark.parametrize(
    "response",
    [
        ApiResponse(200, {}, memoryview(b"<html>")),
        make_response([], b"more"),
        make_response(
            [{"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}], b"1"
        ),
    ],
)
def test_a_response_of_another_server_is_an_error(response):
    with pytest.raises(CallError) as caught:
        convert_response(response)
    assert caught.value.code is Code.INTERNAL
