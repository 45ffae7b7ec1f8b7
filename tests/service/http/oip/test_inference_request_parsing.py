"""Headers of inference requests: what is understood, and what is refused with which reason."""

import json

import pytest
from normserve.errors import (
    InvalidParameterError,
    InvalidShapeError,
    MalformedPayloadError,
    NormserveError,
    TooLargeError,
    UnexpectedTensorError,
    UnsupportedDtypeError,
)
from normserve.http.oip.inference_request import (
    MAX_JSON_BYTES,
    BinarySource,
    InferenceRequest,
    RegionReference,
    make_checked_request,
    make_raw_request,
    parse_header,
    parse_json_length,
)
from normserve.http.oip.models import OPERATIONS, InferenceModel
from normserve.jobs.job import Op, PassDirection

X = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}}
Y = {"name": "y"}
LAYER = InferenceModel("a.norm", Op.LAYER_NORM, PassDirection.FORWARD, is_layer=True)


def read(model="layer_norm", binary_bytes=24, **said) -> InferenceRequest:
    text = json.dumps({"inputs": [X], **said}).encode()
    model = model if isinstance(model, InferenceModel) else OPERATIONS[model]
    return make_checked_request(model, parse_header(text), len(text), len(text) + binary_bytes)


def test_binary_tensors_lie_behind_the_json_one_after_another():
    residual = {"name": "residual", "shape": [3], "datatype": "BF16", "parameters": {"binary_data_size": 6}}
    asked = read(inputs=[X, residual], binary_bytes=30)
    first, second = asked.inputs
    assert isinstance(first.source, BinarySource)
    assert isinstance(second.source, BinarySource)
    assert second.source.start - first.source.start == 24
    assert (second.shape, second.nbytes) == ((3,), 6)


def test_regions_take_no_bytes_of_the_body():
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 24, "shared_memory_offset": 8}
    asked = read(inputs=[{**X, "parameters": place}], outputs=[{**Y, "parameters": place}], binary_bytes=0)
    assert asked.inputs[0].source == RegionReference("r", 8, 24)
    assert asked.outputs is not None
    assert asked.outputs[0].region == RegionReference("r", 8, 24)


def test_statistics_that_are_asked_for_are_computed():
    assert read(outputs=[Y, {"name": "rstd"}]).spec.stats
    assert not read(outputs=[Y]).spec.stats


def test_what_is_said_of_one_output_goes_before_what_is_said_of_all():
    outputs = [Y, {"name": "mean", "parameters": {"binary_data": False}}]
    asked = read(outputs=outputs, parameters={"binary_data_output": True})
    assert asked.outputs is not None
    assert [each.is_binary for each in asked.outputs] == [True, False]


def test_a_timeout_is_microseconds_and_none_is_the_servers():
    assert read(parameters={"timeout": 2500}).timeout_ms == 2.5
    assert read(parameters={"timeout": 0}).timeout_ms is None
    assert read().timeout_ms is None


def test_a_layers_own_parameters_are_not_taken():
    assert read(LAYER).layer == "a.norm"
    for name in ("eps", "layer", "activation"):
        with pytest.raises(InvalidParameterError, match=r"not a parameter of a\.norm"):
            read(LAYER, parameters={name: 1})


def parameters(**said) -> dict[str, object]:
    return {"parameters": said}


def of_input(**said) -> dict[str, object]:
    return {"inputs": [{**X, **said}]}


REFUSED = [
    ({"inputs": [X, X]}, MalformedPayloadError, "name of its own"),
    ({"inputs": {}}, MalformedPayloadError, "is not valid"),
    ({"inputs": [{"name": "x"}]}, MalformedPayloadError, "is not valid"),
    ({"input": [X]}, MalformedPayloadError, "closest is 'inputs'"),
    (of_input(shap=[2]), MalformedPayloadError, "closest is 'shape'"),
    (of_input(parameters={"binary_size": 24}), InvalidParameterError, "closest is 'binary_data_size'"),
    (of_input(parameters={}), MalformedPayloadError, "exactly one"),
    (of_input(data=[1] * 6), MalformedPayloadError, "exactly one"),
    (
        of_input(parameters={"binary_data_size": 24, "shared_memory_region": "r"}),
        MalformedPayloadError,
        "byte_size",
    ),
    (
        of_input(parameters={"binary_data_size": 24, "shared_memory_region": "r", "shared_memory_byte_size": 24}),
        MalformedPayloadError,
        "exactly one",
    ),
    (of_input(parameters={"binary_data_size": 24, "shared_memory_offset": 1}), MalformedPayloadError, "must name"),
    (of_input(parameters={"binary_data_size": 23}), MalformedPayloadError, "24 bytes of its shape"),
    (of_input(parameters={"binary_data_size": -1}), MalformedPayloadError, "is not valid"),
    (of_input(parameters={"binary_data_size": 24.0}), MalformedPayloadError, "whole body|is not valid"),
    (of_input(shape=[2**62, 2**62]), MalformedPayloadError, "2\\^63"),
    (of_input(shape=[2**40, 2**40, 0]), MalformedPayloadError, "2\\^63"),
    (of_input(shape=[-1, 3]), MalformedPayloadError, "is not valid"),
    (of_input(shape=[True, 3]), MalformedPayloadError, "is not valid"),
    (of_input(shape=[1] * 65), MalformedPayloadError, "64 dimensions"),
    (of_input(datatype="FP64"), UnsupportedDtypeError, "FP32, FP16, BF16"),
    (of_input(datatype="BYTES"), UnsupportedDtypeError, "FP32, FP16, BF16"),
    (parameters(epsilon=1), InvalidParameterError, "closest is 'eps'"),
    (parameters(triton_enable_empty_final_response=True), MalformedPayloadError, "reserved"),
    (parameters(timeout=-1), InvalidParameterError, "microseconds"),
    (parameters(timeout=True), InvalidParameterError, "microseconds"),
    (parameters(binary_data_output=1), InvalidParameterError, "true or false"),
    (parameters(eps=[1]), MalformedPayloadError, "is not valid"),
    (parameters(eps=None), InvalidParameterError, "eps must be"),
    (parameters(eps=True), InvalidParameterError, "eps must be"),
    (parameters(num_groups=2), InvalidParameterError, "not a parameter"),
    ({"outputs": [{"name": "dx"}]}, UnexpectedTensorError, "not an output of layer_norm"),
    ({"outputs": [{**Y, **parameters(classification=2)}]}, InvalidParameterError, "classification"),
    ({"outputs": [{**Y, **parameters(binary=True)}]}, InvalidParameterError, "closest is 'binary_data'"),
    ({"model_name": "rms_norm"}, MalformedPayloadError, "model_name"),
    ({"inputs": [{**X, "name": str(n)} for n in range(65)]}, TooLargeError, "64 inputs"),
]


@pytest.mark.parametrize(("said", "error", "reason"), REFUSED, ids=lambda each: str(each)[:60])
def test_what_is_wrong_is_refused_and_said(said, error, reason):
    with pytest.raises(NormserveError, match=reason) as told:
        read(**said)
    assert type(told.value) is error


@pytest.mark.parametrize("binary_bytes", [23, 25, 0])
def test_bytes_that_belong_to_nothing_are_refused(binary_bytes):
    with pytest.raises(MalformedPayloadError, match="whole body"):
        read(binary_bytes=binary_bytes)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b'{"inputs":[],"id":"\xff"}', b'{"inputs":[]} {}'),
        *(b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000,),
        b'{"parameters":{"eps":' + b"[" * 100_000,
        b'{"inputs":[{"name":"x","shape":[' + b"9" * 5000 + b"]}]}",
    ],
    ids=range(10),
)
def test_what_is_no_header_is_refused(text):
    with pytest.raises(MalformedPayloadError):
        parse_header(text)


@pytest.mark.parametrize("said", [b"-1", b"+1", b"1.0", b"0x10", b"", b"a", b"9" * 19, b"1 ", b"\xb2", b"1,1"])
def test_a_length_that_is_no_number_is_refused(said):
    with pytest.raises(MalformedPayloadError, match="number of bytes"):
        parse_json_length(said, None)


def test_a_length_is_within_the_body_and_the_limit():
    assert parse_json_length(b"10", 10) == 10
    assert parse_json_length(None, 10) is None
    with pytest.raises(MalformedPayloadError, match="at most the body's 9"):
        parse_json_length(b"10", 9)
    for said, announced in ((str(MAX_JSON_BYTES + 1).encode(), None), (None, MAX_JSON_BYTES + 1)):
        with pytest.raises(TooLargeError, match="binary data"):
            parse_json_length(said, announced)


def test_a_body_without_json():
    (x,) = make_raw_request(OPERATIONS["rms_norm"], None, 12).inputs
    assert x.shape == (3,)
    (x,) = make_raw_request(LAYER, (4,), 32).inputs
    assert x.shape == (2, 4)
    (x,) = make_raw_request(LAYER, (2, 4), 96).inputs
    assert x.shape == (3, 2, 4)
    with pytest.raises(InvalidShapeError, match="FP32 \\[rows, 2, 4\\]"):
        make_raw_request(LAYER, (2, 4), 48)
    for nbytes in (30, 36):
        with pytest.raises(InvalidShapeError, match="FP32 \\[rows, 4\\]"):
            make_raw_request(LAYER, (4,), nbytes)
    with pytest.raises(MalformedPayloadError, match="JSON header"):
        make_raw_request(OPERATIONS["group_norm"], None, 16)
