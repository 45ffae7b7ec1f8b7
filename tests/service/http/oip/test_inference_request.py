"""The JSON of an inference request: what has too many parts is refused before any of them is read."""

import json

import pytest
from normserve.errors import MalformedPayloadError
from normserve.http.oip import inference_request
from normserve.http.oip.inference_request import MAX_TENSORS, parse_header

INPUT = b'{"name":"x","shape":[1],"datatype":"FP32"}'


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[%b]}' % b",".join([INPUT] * 2000),
        b'{"inputs":[],"outputs":[%b]}' % b",".join([b'{"name":"y"}'] * 5000),
        json.dumps({"inputs": [], "parameters": {str(number): 0 for number in range(5000)}}).encode(),
    ],
    ids=["inputs", "outputs", "parameters"],
)
def test_too_many_fields_are_refused_unread(monkeypatch, text):
    monkeypatch.setattr(inference_request, "_DECODER", None)
    for body in (text, memoryview(text)):
        with pytest.raises(MalformedPayloadError, match="fields"):
            parse_header(body)


def test_a_request_of_as_many_tensors_as_there_may_be_is_read():
    parameters = {"shared_memory_region": "a:b", "shared_memory_byte_size": 4, "shared_memory_offset": 0}
    request = {
        "id": "a:b",
        "parameters": dict.fromkeys("abcdefgh", 1),
        "inputs": [
            {"name": f"x{number}", "shape": [1], "datatype": "FP32", "parameters": parameters}
            for number in range(MAX_TENSORS)
        ],
        "outputs": [{"name": f"y{number}", "parameters": parameters} for number in range(MAX_TENSORS)],
    }
    assert len(parse_header(json.dumps(request).encode()).inputs) == MAX_TENSORS


def test_tensors_behind_json_of_unknown_length_are_named():
    with pytest.raises(
        MalformedPayloadError, match=r"if tensors follow it, Inference-Header-Content-Length must be"
    ):
        parse_header(b'{"inputs": []}' + bytes(8))
