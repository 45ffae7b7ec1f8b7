"""Which format comes in, and which one goes out."""

import httpx
import numpy as np
import pytest
import torch

from tests.integration.harness.wire import (
    NPY,
    SAFETENSORS,
    X,
    assert_problem,
    from_npy,
    npy,
    packed,
    post,
    unpacked,
)


@pytest.mark.parametrize(
    "declared",
    [
        "application/x-npy",
        "Application/X-NPY; charset=binary",
        "application/octet-stream",
        "application/x-www-form-urlencoded",
    ],
)
def test_npy_by_any_name(api, declared):
    assert post(api, content_type=declared).headers["content-type"] == NPY


def test_npy_without_a_type(server):
    with httpx.Client(verify=False) as client:
        request = client.build_request("POST", server.url + "/v1/layer_norm", content=npy(X))
        request.headers.pop("content-type", None)
        assert client.send(request).headers["content-type"] == NPY


@pytest.mark.parametrize(
    "declared",
    ["application/x-safetensors", "application/vnd.safetensors", "application/octet-stream", ""],
)
def test_safetensors_by_any_name(api, declared):
    response = post(api, content=packed(x=torch.from_numpy(X)), content_type=declared)
    assert response.headers["content-type"] == SAFETENSORS
    assert unpacked(response.content)["y"].shape == X.shape


@pytest.mark.parametrize(
    "declared",
    [
        "application/zip",
        "multipart/form-data; boundary=x",
        "application/json",
        "text/plain",
        "application/x-npz",
        "application/python-pickle",
        "application/x-npy, application/x-safetensors",
    ],
)
def test_foreign_types_are_refused(api, declared):
    response = post(api, content_type=declared)
    assert_problem(response, 415, "unsupported_media_type")
    assert SAFETENSORS in response.headers["accept"]


@pytest.mark.parametrize("encoding", ["br", "gzip", "deflate", "zstd", "gzip, br", "x-unknown"])
def test_compressed_bodies_are_refused(api, encoding):
    assert_problem(post(api, content_encoding=encoding), 415)


def test_identity_is_no_compression(api):
    assert post(api, content_encoding="identity").status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04" + bytes(100),
        b"\x80\x04\x95" + bytes(50),
        b"x=1&y=2",
        b"--boundary\r\nContent-Disposition: form-data",
        b"\x1f\x8b\x08" + bytes(30),
    ],
    ids=["npz", "pickle", "urlencoded", "multipart", "gzip"],
)
@pytest.mark.parametrize("declared", ["application/x-www-form-urlencoded", "application/octet-stream"])
def test_what_the_first_bytes_do_not_show_is_refused(api, content, declared):
    assert_problem(post(api, content=content, content_type=declared), 415)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", NPY),
        (SAFETENSORS, SAFETENSORS),
        ("application/vnd.safetensors", SAFETENSORS),
        (f"{NPY};q=0.5, {SAFETENSORS}", SAFETENSORS),
        (f"{SAFETENSORS};q=0.5, {NPY};q=0.9", NPY),
        ("application/*;q=0.1, text/html", NPY),
        (f"{NPY};q=0, */*;q=0.1", SAFETENSORS),
        ("application/json, */*;q=0.1", NPY),
        ("APPLICATION/X-SAFETENSORS ; Q=1", SAFETENSORS),
    ],
)
def test_accept_decides(api, accept, expected):
    response = post(api, accept=accept)
    assert response.headers["content-type"] == expected
    y = from_npy(response.content) if expected == NPY else unpacked(response.content)["y"].numpy()
    assert y.shape == X.shape


@pytest.mark.parametrize("accept", ["text/html", "application/json", "*/*;q=0", "application/x-npz"])
def test_nothing_else_can_be_had(api, accept):
    assert_problem(post(api, accept=accept), 406, "not_acceptable")


def test_bfloat16_has_no_npy(api):
    response = post(api, params={"out_dtype": "bfloat16"})
    assert_problem(response, 406)
    assert "bfloat16" in response.json()["detail"]
    assert post(api, params={"out_dtype": "bfloat16"}, accept=SAFETENSORS).status_code == 200


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_npy_has_no_statistics(api, op):
    response = post(api, f"/v1/{op}", params={"stats": "true"})
    assert_problem(response, 406, "not_acceptable")
    assert SAFETENSORS in response.json()["detail"]
    tensors = packed(x=torch.from_numpy(X))
    refused = post(api, f"/v1/{op}", tensors, content_type=SAFETENSORS, accept=NPY, params={"stats": "true"})
    assert_problem(refused, 406, "not_acceptable")
    assert post(api, f"/v1/{op}", params={"stats": "false"}).headers["content-type"] == NPY
    answered = unpacked(post(api, f"/v1/{op}", params={"stats": "true"}, accept=SAFETENSORS).content)
    assert answered.keys() == {"y", "rstd"} | ({"mean"} if op == "layer_norm" else set())


def test_forward_with_a_residual_as_npy_is_y_alone(api):
    tensors = {"x": torch.from_numpy(X), "residual": torch.ones(2, 12)}
    response = post(api, "/v1/layer_norm", packed(**tensors), content_type=SAFETENSORS, accept=NPY)
    y = post(api, "/v1/layer_norm", packed(**tensors), content_type=SAFETENSORS)
    np.testing.assert_array_equal(from_npy(response.content), unpacked(y.content)["y"].numpy())


def test_backward_as_npy_is_dx_alone(api):
    tensors = {"x": torch.from_numpy(X), "dy": torch.ones(2, 12), "weight": torch.ones(12)}
    response = post(api, "/v1/layer_norm/backward", packed(**tensors), content_type=SAFETENSORS, accept=NPY)
    assert from_npy(response.content).shape == X.shape
