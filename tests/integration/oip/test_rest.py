"""The protocol's REST part as KServe's InferenceRESTClient speaks it, and errors wherever they arise."""

import json
import socket
import uuid

import httpx
import numpy as np
import pytest

from tests.integration.harness.raw import Connection, exchange, head
from tests.integration.oip.models import random

X = random(2, 4)


def request_of(**more: object) -> dict[str, object]:
    """What `InferRequest.to_rest` makes: an id always, and the model's name a second time."""
    x = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": X.flatten().tolist()}
    return {"id": str(uuid.uuid4()), "model_name": "layer_norm", "inputs": [x], **more}


def test_inference_with_json(api):
    said = request_of()
    response = api.post("/v2/models/layer_norm/infer", content=json.dumps(said))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    told = response.json()
    assert (told["id"], told["model_name"], told["model_version"]) == (said["id"], "layer_norm", "1")
    (output,) = told["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", "FP32", [2, 4])
    y = np.array(output["data"], np.float32).reshape(2, 4)
    np.testing.assert_allclose(y.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(1), 1, atol=1e-3)


def test_json_may_begin_with_a_byte_order_mark(api):
    text = b"\xef\xbb\xbf" + json.dumps(request_of()).encode()
    assert api.post("/v2/models/layer_norm/infer", content=text).status_code == 200
    # The same with its length, and for the other routes that read JSON.
    headers = {"inference-header-content-length": str(len(text))}
    assert api.post("/v2/models/layer_norm/infer", content=text, headers=headers).status_code == 200
    assert api.post("/v2/repository/index", content=b"\xef\xbb\xbf{}").status_code == 200
    assert api.post("/v2/repository/index", content=b"\xef\xbb\xbf" * 2 + b"{}").status_code == 400


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_server_is_there_with_and_without_a_slash(api, method):
    with_slash, without = (api.request(method, path) for path in ("/v2/", "/v2"))
    assert with_slash.status_code == without.status_code == 200
    assert with_slash.content == without.content


def test_inference_with_binary_tensors(api):
    x = {"name": "x", "shape": [2, 4], "datatype": "FP16", "parameters": {"binary_data_size": 16}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    text = json.dumps(request_of(inputs=[x], outputs=outputs, parameters={"eps": 1e-3})).encode()
    headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
    content = text + X.astype(np.float16).tobytes()
    response = api.post("/v2/models/layer_norm/infer", content=content, headers=headers)
    assert response.status_code == 200, response.text
    length = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.content[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 16}
    assert len(response.content) == length + 16


def test_nested_data_is_as_good_as_flat(api):
    nested = request_of()
    nested["inputs"] = [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": X.tolist()}]
    first, second = (api.post("/v2/models/layer_norm/infer", json=each) for each in (request_of(), nested))
    assert first.json()["outputs"] == second.json()["outputs"]


def test_probes_answer_with_the_json_that_the_client_reads(api):
    assert api.get("/v2/health/live").json()["live"] is True
    assert api.get("/v2/health/ready").json()["ready"] is True
    assert api.get("/v2/models/layer_norm/ready").is_success
    assert api.head("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("path", ["/v2/models/rms_norm/infer", "/v2/models/rms_norm/versions/1/infer"])
def test_a_name_in_the_body_that_is_not_the_paths_is_refused(api, path):
    response = api.post(path, json=request_of())
    assert response.status_code == 400
    assert "model_name" in response.json()["error"]


def test_names_arrive_quoted(api):
    assert api.get("/v2/models/layer%5Fnorm").json()["name"] == "layer_norm"
    assert api.get("/v2/models/layer%2Fnorm").status_code == 404


def test_a_body_without_json_is_one_row_of_x(api):
    response = api.post(
        "/v2/models/rms_norm/infer", content=X.tobytes(), headers={"inference-header-content-length": "0"}
    )
    length = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.content[:length])["outputs"]
    assert output["shape"] == [8]
    y = np.frombuffer(response.content[length:], np.float32)
    np.testing.assert_allclose(y, X.ravel() / np.sqrt((X**2).mean()), rtol=1e-4)


@pytest.mark.parametrize("model", ["group_norm", "layer_norm_backward"])
def test_a_body_without_json_is_refused_where_that_says_too_little(api, model):
    headers = {"inference-header-content-length": "0"}
    response = api.post(f"/v2/models/{model}/infer", content=X.tobytes(), headers=headers)
    assert response.status_code == 400
    assert "JSON header" in response.json()["error"]


def assert_plain_error(answer: httpx.Response, status: int, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert told.keys() == {"error"}
    assert said in told["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nobody", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2/models/layer_norm/infer", 405),
        ("PUT", "/v2/models/layer_norm/infer", 405),
        ("POST", "/v2", 405),
        ("POST", "/v2/models/layer_norm/infer", 400),
        ("POST", "/v2/models/layer_norm/infer?x=%zz", 400),
    ],
)
def test_every_error_is_plain_json(api, method, path, status):
    assert_plain_error(api.request(method, path), status)


def test_other_paths_keep_their_problem_documents(api):
    for path in ("/v20/models", "/v1/nothing", "/nothing/v2"):
        assert api.get(path).headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: a", "Content-Length: 1", "Content-Length: 2"], 400),
        (["Host: a", "Content-Length: x"], 400),
        (["Host: a", "X: " + "a" * 70_000], 431),
        (["Host: a", "Transfer-Encoding: gzip, chunked"], 501),
        (["Host: a", "Transfer-Encoding: chunked", "", "zz"], 400),
    ],
)
@pytest.mark.parametrize("target", ["/v2/models/layer_norm/infer", "http://a/v2/models/layer_norm/infer?b=c"])
def test_so_is_what_the_transport_refuses(server, lines, status, target):
    request = "\r\n".join((f"POST {target} HTTP/1.1", *lines, "", "")).encode()
    answer = exchange(server.address, request)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert answer.headers["content-type"] == "application/json"
    elsewhere = exchange(server.address, request.replace(b"/v2/", b"/v1/"))
    assert elsewhere.headers["content-type"] == "application/problem+json"


def test_a_body_that_is_too_long_is_refused_unread(server):
    for length, said in ((10**12, "at most"), (5 * 2**20, "JSON")):
        with Connection(server.address) as connection:
            connection.sendall(head("/v2/models/layer_norm/infer", f"Content-Length: {length}"))
            answer = connection.answer()
        assert answer.status_code == 413
        assert said in answer.json()["error"]


def test_a_full_server_says_when_to_come_again(start_server):
    server = start_server("--max-inflight-requests", "1")
    text = json.dumps(request_of()).encode()
    with Connection(server.address) as first, server.client() as api:
        first.sendall(head("/v2/models/layer_norm/infer", f"Content-Length: {len(text)}", "Expect: 100-continue"))
        assert first.recv(100).startswith(b"HTTP/1.1 100")
        response = api.post("/v2/models/layer_norm/infer", content=text)
        assert_plain_error(response, 429)
        assert int(response.headers["retry-after"]) >= 1
        first.sendall(text)
        first.shutdown(socket.SHUT_WR)
        assert first.answer().status_code == 200
