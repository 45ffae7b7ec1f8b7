"""What a newcomer gets wrong, and what the answer says about it."""

import io

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
    ],
)
def test_the_closest_path_is_named(api, path, closest):
    answer = api.post(path, content=npy(X))
    assert_problem(answer, 404, "not_found")
    assert f"; the closest path is {closest};" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/" + "z" * 200, "/%00%ff", "/wp-login.php"])
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


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, X)
    return file.getvalue()


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
