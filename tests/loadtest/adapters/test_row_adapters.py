import io
import json

import numpy as np
import pytest
from normload.adapters.row_adapters import KServeAdapter, NpyAdapter, make_parameters
from normload.load.element_types import to_float64
from normload.load.request_cases import RequestCase
from normserve.client import DType, UnexpectedAnswerError
from normserve.client.responses.api_response import ApiResponse
from normserve.codec import npy

ROWS = RequestCase("layer_norm", (3, 8), DType.FLOAT32, seed=1)


def test_npy_is_x_there_and_y_back():
    tensors = ROWS.make_tensors()
    body = b"".join(NpyAdapter().make_request(ROWS, tensors).parts)
    np.testing.assert_array_equal(to_float64(npy.decode(memoryview(body))), to_float64(tensors["x"]))
    assert NpyAdapter().parse_tensors(ROWS, ApiResponse(200, {}, memoryview(body))) == {"y": tensors["x"]}
    with pytest.raises(UnexpectedAnswerError, match="not npy"):
        NpyAdapter().parse_tensors(ROWS, ApiResponse(200, {}, memoryview(b"hello")))


def test_kserve_has_raw_bytes_behind_its_json():
    tensors = ROWS.make_tensors()
    exchange = KServeAdapter().make_request(ROWS, tensors)
    length = int(exchange.headers["Inference-Header-Content-Length"])
    body = b"".join(exchange.parts)
    (given,) = json.loads(body[:length])["inputs"]
    assert (given["name"], given["shape"], given["datatype"]) == ("x", [3, 8], "FP32")
    assert given["parameters"]["binary_data_size"] == len(body) - length == 96
    assert body[length:] == bytes(tensors["x"].data)
    head = json.dumps({"outputs": [{"name": "y", "shape": [3, 8], "datatype": "FP32"}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = ApiResponse(200, headers, memoryview(head + body[length:]))
    np.testing.assert_array_equal(
        to_float64(KServeAdapter().parse_tensors(ROWS, answer)["y"]), to_float64(tensors["x"])
    )
    for wrong in (ApiResponse(200, {}, answer.body), ApiResponse(200, headers, memoryview(b"{}" + bytes(200)))):
        with pytest.raises(UnexpectedAnswerError, match="KServe"):
            KServeAdapter().parse_tensors(ROWS, wrong)


@pytest.mark.parametrize(
    ("output", "length"),
    [
        ({"shape": [3, 8], "datatype": "FP32"}, None),
        ({"shape": [3, 8], "datatype": "FP32"}, "-5"),
        ({"shape": [3, 8], "datatype": "FP32"}, "9" * 5000),
        ({"shape": [3, 9], "datatype": "FP32"}, ""),
        ({"shape": [3, -8], "datatype": "FP32"}, ""),
        ({"shape": [3, 8.0], "datatype": "FP32"}, ""),
        ({"shape": "38", "datatype": "FP32"}, ""),
        ({"shape": [1] * 100 + [24], "datatype": "FP32"}, ""),
        ({"shape": [3, 8], "datatype": ["FP32"]}, ""),
        ({"shape": [3, 8]}, ""),
        ([], ""),
    ],
)
def test_kserves_json_may_lie(output, length):
    head = json.dumps({"outputs": [output]}).encode()
    headers = {} if length is None else {"inference-header-content-length": length or str(len(head))}
    with pytest.raises(UnexpectedAnswerError):
        KServeAdapter().parse_tensors(ROWS, ApiResponse(200, headers, memoryview(head + bytes(96))))
    nested = {"inference-header-content-length": "100000"}
    with pytest.raises(UnexpectedAnswerError):
        KServeAdapter().parse_tensors(ROWS, ApiResponse(200, nested, memoryview(b"[" * 100_000)))


def test_npy_may_be_in_column_major_order():
    x = to_float64(ROWS.make_tensors()["x"]).astype(np.float32)
    file = io.BytesIO()
    np.save(file, np.asfortranarray(x))
    np.testing.assert_array_equal(
        to_float64(NpyAdapter().parse_tensors(ROWS, ApiResponse(200, {}, memoryview(file.getvalue())))["y"]), x
    )


def test_servers_of_rows_hold_the_parameters_of_any_number_of_them():
    held = make_parameters(ROWS)
    more = RequestCase("layer_norm", (50, 8), DType.FLOAT32, seed=1).make_tensors()
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(held[name], to_float64(more[name]))
