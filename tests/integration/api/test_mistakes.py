"""What a newcomer gets wrong, and what the answer says about it."""

import io
import json

import numpy as np
import pytest
import torch

from tests.integration.harness.wire import NPY, SAFETENSORS, assert_problem, npy, packed

FORM = "application/x-www-form-urlencoded"
X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("path", "closest"),
    [
        ("/v1/layernorm", "/v1/layer_norm"),
        ("/v1/layer_norm/", "/v1/layer_norm"),
        ("/v1/rmsnorm/backward", "/v1/rms_norm/backward"),
        ("/metric", "/metrics"),
        ("/v1/layer", "/v1/layers"),
        ("/v1/layer/encoder.norm", "/v1/layers/{name}"),
        ("/v1/layer/layer_norm", "/v1/layers/{name}"),
    ],
)
def test_the_closest_path_is_named(api, path, closest):
    answer = api.post(path, content=npy(X))
    assert_problem(answer, 404, "not_found")
    assert f"; the closest path is {closest};" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v2/model/layer_norm/infer", "/v2/models/layer_norm/inferr"])
def test_the_closest_path_is_named_over_v2(api, path):
    answer = api.post(path)
    assert answer.status_code == 404
    assert "; the closest path is /v2/models/{name}/infer;" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/instance_norm", "/v1/instance_norm/backward"])
def test_of_instance_norm_the_operation_is_named_that_computes_it(api, path):
    answer = api.post(path, content=npy(X))
    assert_problem(answer, 404, "not_found")
    assert "instance_norm is group_norm with num_groups equal to the channels;" in answer.json()["detail"]
    assert "closest" not in answer.json()["detail"]


@pytest.mark.parametrize("name", ["instance_norm", "instance_norm_backward"])
def test_of_instance_norm_the_operation_is_named_over_v2(api, name):
    answer = api.post(f"/v2/models/{name}/infer")
    assert answer.status_code == 404
    assert "instance_norm is group_norm with num_groups equal to the channels;" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/" + "z" * 200, "/%00%ff", "/wp-login.php", "/shop/encoder.norm"])
def test_of_what_is_like_nothing_no_path_is_named(api, path):
    answer = api.get(path)
    assert_problem(answer, 404, "not_found")
    assert "closest" not in answer.json()["detail"]


@pytest.mark.parametrize("body", [npy(X), packed(x=torch.ones(2, 4))])
def test_what_curl_leaves_out_is_said(api, body):
    """As `curl -d @FILE` sends it."""
    stripped = body.translate(None, b"\0\r\n")
    answer = api.post("/v1/layer_norm", content=stripped, headers={"content-type": FORM})
    assert answer.status_code in (400, 415)
    assert "not with --data-binary" in answer.json()["detail"]
    said = api.post("/v1/layer_norm", content=stripped, headers={"content-type": "application/octet-stream"})
    assert "--data-binary" not in said.json()["detail"]
    assert api.post("/v1/layer_norm", content=body, headers={"content-type": FORM}).status_code == 200


def infer_body() -> tuple[bytes, dict[str, str]]:
    """Of /v2, with x as bytes behind the JSON, and the header that says so."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": X.nbytes}}
    said = json.dumps({"inputs": [tensor]}).encode()
    return said + X.tobytes(), {"inference-header-content-length": str(len(said))}


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("path", ["/v1/layers/a?op=layer_norm", "/v2/models/layer_norm/infer"])
def test_what_curl_leaves_out_is_said_of_layers_and_over_v2(api, path, keeps_all):
    body, headers = infer_body() if "infer" in path else (packed(weight=torch.ones(4)), {})
    sent = body[:-1] if keeps_all else body.translate(None, b"\0\r\n")
    method = "POST" if "infer" in path else "PUT"
    answer = api.request(method, path, content=sent, headers={"content-type": FORM, **headers})
    assert answer.status_code in (400, 415)
    assert ("--data-binary" in answer.text) == (not keeps_all)


@pytest.mark.parametrize("text", [b"{}", b'{"inputs": [{"name": "x", "datatype": "FP32",'])
def test_json_loses_nothing_with_curl(api, text):
    answer = api.post("/v2/models/layer_norm/infer", content=text, headers={"content-type": FORM})
    assert answer.status_code == 400
    assert "curl" not in answer.json()["error"]


def checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, file)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, X)
    return file.getvalue()


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (archive(), "an .npz archive"),
        (checkpoint(), "a .pt file"),
        (b'{"x": [1, 2, 3]}', "JSON"),
        (b'{"xxxx":{"a": 1}}', "JSON"),
        (npy(X)[:-1], ""),
    ],
    ids=["npz", "pt", "json", "nested json", "npy"],
)
def test_of_a_whole_file_curl_is_not_blamed(api, method, body, said):
    """As `curl --data-binary @FILE` sends it."""
    path = "/v1/layer_norm" if method == "POST" else "/v1/layers/a?op=layer_norm"
    answer = api.request(method, path, content=body, headers={"content-type": FORM})
    assert answer.status_code in (400, 415)
    assert said in answer.json()["detail"]
    assert "curl" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "declared", "shown"),
    [(npy(X), SAFETENSORS, NPY), (packed(x=torch.ones(2, 4)), NPY, SAFETENSORS)],
    ids=["npy", "safetensors"],
)
def test_one_format_announced_as_the_other_is_named(api, body, declared, shown):
    answer = api.post("/v1/layer_norm", content=body, headers={"content-type": declared})
    assert_problem(answer, 400, "malformed_payload")
    assert answer.json()["detail"].endswith(f"; its first bytes show {shown}, Content-Type says {declared}")


@pytest.mark.parametrize(
    ("body", "media_type", "said"),
    [
        (archive(), NPY, "an .npz archive of numpy's"),
        (archive(), SAFETENSORS, "an .npz archive of numpy's"),
        (b'{"xxxx":{"a": 1}}', "application/octet-stream", "JSON"),
        (b"1.0,2.0\n", NPY, "text, as CSV files are"),
    ],
)
def test_what_is_announced_as_something_else_is_named(api, body, media_type, said):
    answer = api.post("/v1/layer_norm", content=body, headers={"content-type": media_type})
    assert_problem(answer, 400, "malformed_payload")
    assert f"; its first bytes show {said}" in answer.json()["detail"]


@pytest.mark.parametrize(("op", "query"), [("layer_norm", {}), ("group_norm", {"num_groups": 2, "layout": "nhwc"})])
def test_of_a_wrong_length_both_shapes_are_named(api, op, query):
    content = packed(x=torch.ones(2, 4), weight=torch.ones(5))
    answer = api.post(f"/v1/{op}", content=content, params=query, headers={"content-type": SAFETENSORS})
    assert_problem(answer, 422, "invalid_shape")
    assert answer.json()["detail"] == "x [2, 4] needs weight [4], got [5]"
