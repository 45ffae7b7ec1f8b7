"""What a newcomer gets wrong, and what the answer says about it."""

import bz2
import gzip
import io
import json
import lzma

import numpy as np
import pytest
import torch

from tests.integration.harness.wire import NPY, SAFETENSORS, assert_problem, npy, packed

FORM = "application/x-www-form-urlencoded"
X = np.ones((2, 4), np.float32)
# As `curl -F` and `requests.post(files=…)` send a file.
FORM_BODY = b'--a\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + npy(X) + b"\r\n--a--"


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
        ("/v1/layer_norm/forward", "/v1/layer_norm"),
        ("/v1/rmsnorm/forward", "/v1/rms_norm"),
        ("/v1/group_norm_forward", "/v1/group_norm"),
        ("/v1/layer_norm/fwd", "/v1/layer_norm"),
        ("/v1/layer_norm/backwards", "/v1/layer_norm/backward"),
    ],
)
def test_the_closest_path_is_named(api, path, closest):
    answer = api.post(path, content=npy(X))
    assert_problem(answer, 404, "not_found")
    assert f"; the closest path is {closest};" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["/v2/model/layer_norm/infer", "/v2/models/layer_norm/inferr", "/v2/models/layer_norm/forward"]
)
def test_the_closest_path_is_named_over_v2(api, path):
    answer = api.post(path)
    assert answer.status_code == 404
    assert "; the closest path is /v2/models/{name}/infer;" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/instance_norm", "/v1/instance_norm/forward", "/v1/instance_norm/backward"])
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
    assert answer.json()["detail"].startswith(
        f"Content-Type says {declared}, the body's first bytes show {shown}; "
    )


@pytest.mark.parametrize("path", ["/v1/layer_norm", "/v1/layers/a?op=layer_norm"])
@pytest.mark.parametrize(
    ("media_type", "said"),
    [
        ("application/json", "send bytes, as numpy.save writes them; operations take JSON below /v2"),
        ("application/json; charset=utf-8", "operations take JSON below /v2"),
        ("multipart/form-data; boundary=a", "with --data-binary of curl or data= of requests"),
        ("application/gzip", "send the file uncompressed"),
        ("text/plain", "without a Content-Type the body's first bytes decide"),
    ],
)
def test_of_another_media_type_it_is_said_what_to_send(api, path, media_type, said):
    method = "PUT" if "layers" in path else "POST"
    answer = api.request(method, path, content=b"{}", headers={"content-type": media_type})
    assert_problem(answer, 415, "unsupported_media_type")
    detail = answer.json()["detail"]
    assert f"got {media_type.partition(';')[0]!r}; " in detail
    assert detail.endswith(said)


@pytest.mark.parametrize("path", ["/v1/layer_norm", "/v1/layers/a?op=layer_norm", "/v2/models/layer_norm/infer"])
def test_a_coding_is_named(api, path):
    method = "PUT" if "layers" in path else "POST"
    answer = api.request(method, path, content=gzip.compress(npy(X)), headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "the body must be uncompressed, without a Content-Encoding, got 'gzip'" in answer.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (gzip.compress(npy(X)), "gzip: send the file uncompressed"),
        (lzma.compress(npy(X)), "xz: send the file uncompressed"),
        (bz2.compress(npy(X)), "bzip2: send the file uncompressed"),
        (FORM_BODY, "a form: send the file itself, with --data-binary of curl or data= of requests"),
    ],
    ids=["gzip", "xz", "bzip2", "form"],
)
def test_an_undeclared_coding_or_form_is_named(api, body, said):
    answer = api.post("/v1/layer_norm", content=body)
    assert_problem(answer, 415, "unsupported_media_type")
    assert answer.json()["detail"].endswith(f"its first bytes show {said}")
    answer = api.post("/v2/models/layer_norm/infer", content=body)
    assert answer.status_code == 400
    assert f"its first bytes show {said}; " in answer.json()["error"]


def test_a_file_for_v1_is_named_over_v2(api):
    answer = api.post("/v2/models/layer_norm/infer", content=npy(X))
    assert answer.status_code == 400
    assert f"its first bytes show {NPY}, which /v1 takes; " in answer.json()["error"]


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
    assert answer.json()["detail"].startswith(f"the body's first bytes show {said}")


@pytest.mark.parametrize(("op", "query"), [("layer_norm", {}), ("group_norm", {"num_groups": 2, "layout": "nhwc"})])
def test_of_a_wrong_length_both_shapes_are_named(api, op, query):
    content = packed(x=torch.ones(2, 4), weight=torch.ones(5))
    answer = api.post(f"/v1/{op}", content=content, params=query, headers={"content-type": SAFETENSORS})
    assert_problem(answer, 422, "invalid_shape")
    assert answer.json()["detail"] == "x [2, 4] needs weight [4], got [5]"


@pytest.mark.parametrize(
    ("sent", "closest"), [("weights", "weight"), ("input", "x"), ("INPUT__0", "x"), ("norm.gamma", "weight")]
)
def test_the_closest_tensor_is_named(api, sent, closest):
    others = {} if closest == "x" else {"x": torch.ones(2, 4)}
    answer = api.post("/v1/layer_norm", content=packed(**{sent: torch.ones(4)}, **others))
    assert_problem(answer, 422, "unexpected_tensor")
    assert answer.json()["detail"].endswith(f"got {sent!r}; the closest is {closest!r}")


def test_the_closest_tensor_of_a_layer_is_named(api):
    answer = api.put("/v1/layers/a?op=layer_norm", content=packed(weights=torch.ones(4)))
    assert_problem(answer, 422, "unexpected_tensor")
    assert (
        answer.json()["detail"]
        == "a layer of layer_norm takes weight, bias, got 'weights'; the closest is 'weight'"
    )


def test_the_closest_tensor_is_named_over_v2(api):
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    answer = api.post("/v2/models/layer_norm/infer", json={"inputs": [tensor]})
    assert answer.status_code == 422
    assert answer.json()["error"].endswith("got 'input'; the closest is 'x'")


@pytest.mark.parametrize("num_groups", [1, 3, 32])
def test_of_images_with_channels_last_the_layout_is_named(api, num_groups):
    content = packed(x=torch.ones(2, 8, 8, 3), weight=torch.ones(3), bias=torch.ones(3))
    answer = api.post("/v1/group_norm", content=content, params={"num_groups": num_groups})
    assert answer.status_code == 422
    assert answer.json()["detail"].endswith("; with layout=nhwc x has 3 channels")
