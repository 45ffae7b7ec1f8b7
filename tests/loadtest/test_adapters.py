import io
import json

import httpx
import numpy as np
import pytest
from normload.adapters.native import Native
from normload.adapters.registry import ADAPTERS
from normload.adapters.rows import KServe, Npy, parameters
from normload.cases import Case
from normload.elements import widen
from normload.pool import require_askable
from normload.tables import ScenarioError
from normserve.client import Client, DType, UnexpectedAnswerError
from normserve.client.protocol import Answer
from normserve.codec import npy, safetensors

ROWS = Case("layer_norm", (3, 8), DType.FLOAT32, seed=1)


def joined(parts):
    return b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize(
    "case",
    [
        ROWS,
        Case("rms_norm/backward", (2, 4), DType.BFLOAT16, residual=True),
        Case("group_norm", (1, 2, 2, 4), DType.FLOAT16, "silu", num_groups=2, layout="nhwc", adaptive=True),
    ],
)
def test_native_sends_what_the_client_sends(case):
    sent = []

    def answer(request):
        sent.append(request)
        return httpx.Response(503)

    tensors = case.tensors()
    client = Client("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    with pytest.raises(Exception, match="503"), client:
        getattr(client, case.operation.replace("/", "_"))(**tensors, **case.parameters())
    exchange = Native().exchange(case, tensors)
    assert (exchange.method, exchange.target) == (sent[0].method, sent[0].url.raw_path.decode())
    assert joined(exchange.parts) == sent[0].content
    assert exchange.headers["content-type"] == sent[0].headers["content-type"]


def test_native_reads_every_tensor():
    body = joined(safetensors.encode({"y": ROWS.tensors()["x"], "residual_out": ROWS.tensors()["x"]}))
    answer = Answer(200, {"content-type": "application/x-safetensors"}, memoryview(body))
    assert Native().tensors(ROWS, answer).keys() == {"y", "residual_out"}


def test_npy_is_x_there_and_y_back():
    tensors = ROWS.tensors()
    body = joined(Npy().exchange(ROWS, tensors).parts)
    np.testing.assert_array_equal(widen(npy.decode(memoryview(body))), widen(tensors["x"]))
    assert Npy().tensors(ROWS, Answer(200, {}, memoryview(body))) == {"y": tensors["x"]}
    with pytest.raises(UnexpectedAnswerError, match="no npy"):
        Npy().tensors(ROWS, Answer(200, {}, memoryview(b"hello")))


def test_kserve_has_raw_bytes_behind_its_json():
    tensors = ROWS.tensors()
    exchange = KServe().exchange(ROWS, tensors)
    length = int(exchange.headers["Inference-Header-Content-Length"])
    body = joined(exchange.parts)
    (given,) = json.loads(body[:length])["inputs"]
    assert (given["name"], given["shape"], given["datatype"]) == ("x", [3, 8], "FP32")
    assert given["parameters"]["binary_data_size"] == len(body) - length == 96
    assert body[length:] == bytes(tensors["x"].data)
    head = json.dumps({"outputs": [{"name": "y", "shape": [3, 8], "datatype": "FP32"}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = Answer(200, headers, memoryview(head + body[length:]))
    np.testing.assert_array_equal(widen(KServe().tensors(ROWS, answer)["y"]), widen(tensors["x"]))
    for wrong in (Answer(200, {}, answer.body), Answer(200, headers, memoryview(b"{}" + bytes(200)))):
        with pytest.raises(UnexpectedAnswerError, match="KServe"):
            KServe().tensors(ROWS, wrong)


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
        KServe().tensors(ROWS, Answer(200, headers, memoryview(head + bytes(96))))
    nested = {"inference-header-content-length": "100000"}
    with pytest.raises(UnexpectedAnswerError):
        KServe().tensors(ROWS, Answer(200, nested, memoryview(b"[" * 100_000)))


def test_npy_may_be_in_column_major_order():
    x = widen(ROWS.tensors()["x"]).astype(np.float32)
    file = io.BytesIO()
    np.save(file, np.asfortranarray(x))
    np.testing.assert_array_equal(widen(Npy().tensors(ROWS, Answer(200, {}, memoryview(file.getvalue())))["y"]), x)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_answer_may_be_as_long_as_a_right_one(name):
    most = ADAPTERS[name]().exchange(ROWS, ROWS.tensors()).most_bytes
    assert 0 <= most - ROWS.tensors()["x"].nbytes - 2**16 <= 8


def test_servers_of_rows_hold_the_parameters_of_any_number_of_them():
    held = parameters(ROWS)
    more = Case("layer_norm", (50, 8), DType.FLOAT32, seed=1).tensors()
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(held[name], widen(more[name]))


@pytest.mark.parametrize(
    "case",
    [
        Case("rms_norm", (3, 8), DType.FLOAT32),
        Case("layer_norm/backward", (3, 8), DType.FLOAT32),
        Case("layer_norm", (3, 8), DType.BFLOAT16),
        Case("layer_norm", (3, 8), DType.FLOAT32, activation="silu"),
        Case("layer_norm", (3, 8), DType.FLOAT32, residual=True),
        Case("layer_norm", (3, 8), DType.FLOAT32, affine=False),
    ],
)
def test_what_a_kind_of_server_does_not_do_is_said_before_it_is_asked(case):
    for name in ("npy", "kserve"):
        with pytest.raises(ScenarioError, match="such a server does only"):
            require_askable(ADAPTERS[name](), [ROWS, case])
    require_askable(ADAPTERS["normserve"](), [ROWS, case])
