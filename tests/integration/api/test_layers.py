"""Registered layers: their life, their use, and what is no layer."""

import uuid

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


@pytest.fixture
def name(api):
    chosen = f"test.{uuid.uuid4().hex}"
    yield chosen
    api.delete(f"/v1/layers/{chosen}")


def put(api, name, tensors, **params):
    return api.put(
        f"/v1/layers/{name}",
        content=packed(**tensors),
        params=params,
        headers={"content-type": SAFETENSORS},
    )


def test_life_of_a_layer(api, name):
    weight, bias = torch.randn(12), torch.randn(12)
    made = put(api, name, {"weight": weight, "bias": bias}, op="layer_norm", eps=0.5, activation="relu")
    assert made.status_code == 201
    described = made.json()
    assert described == api.get(f"/v1/layers/{name}").json()
    assert described in api.get("/v1/layers").json()["layers"]
    assert described == {
        "name": name,
        "op": "layer_norm",
        "eps": 0.5,
        "activation": "relu",
        "negative_slope": 0.01,
        "size": 12,
        "dtype": "float32",
        "bias": True,
        "weight_offset": 0.0,
    }
    y = from_npy(post(api, params={"layer": name}).content)
    x = torch.from_numpy(X)
    expected = torch.nn.functional.layer_norm(x, (12,), weight, bias, 0.5).relu()
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-6)
    assert put(api, name, {"weight": weight}, op="rms_norm").status_code == 200
    assert api.delete(f"/v1/layers/{name}").status_code == 204
    assert_problem(api.delete(f"/v1/layers/{name}"), 404, "unknown_layer")
    assert_problem(api.get(f"/v1/layers/{name}"), 404, "unknown_layer")
    assert_problem(post(api, params={"layer": name}), 404, "unknown_layer")


def test_backward_through_a_layer_gives_its_gradients(api, name):
    weight = torch.randn(12)
    assert put(api, name, {"weight": weight}, op="rms_norm").status_code == 201
    x, dy = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    sent = packed(x=x, dy=dy)
    response = post(api, "/v1/rms_norm/backward", sent, {"layer": name}, content_type=SAFETENSORS)
    got = unpacked(response.content)
    x.requires_grad_()
    weight.requires_grad_()
    torch.nn.functional.rms_norm(x, (12,), weight, 1e-6).backward(dy)
    torch.testing.assert_close(got["dx"], x.grad)
    torch.testing.assert_close(got["dweight"], weight.grad)


def test_group_norm_layer(api, name):
    weight, bias = torch.randn(6), torch.randn(6)
    made = put(api, name, {"weight": weight, "bias": bias}, op="group_norm", num_groups=3)
    assert made.json()["num_groups"] == 3
    x = torch.randn(2, 6, 5)
    response = post(api, "/v1/group_norm", packed(x=x), {"layer": name}, content_type=SAFETENSORS)
    expected = torch.nn.functional.group_norm(x, 3, weight, bias)
    torch.testing.assert_close(unpacked(response.content)["y"], expected)


@pytest.mark.parametrize(
    ("tensors", "params", "status", "code"),
    [
        ({"weight": (4,)}, {}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "batch_norm"}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "group_norm"}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "layer_norm", "num_groups": 2}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "group_norm", "num_groups": 3}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "layer_norm", "dropout": 0.5}, 422, "invalid_parameter"),
        ({"bias": (4,)}, {"op": "layer_norm"}, 422, "missing_tensor"),
        ({"weight": (4,), "bias": (4,)}, {"op": "rms_norm"}, 422, "unexpected_tensor"),
        ({"weight": (4,), "scale": (1, 4)}, {"op": "group_norm", "num_groups": 2}, 422, "unexpected_tensor"),
        ({"weight": (4,), "bias": (5,)}, {"op": "layer_norm"}, 422, "invalid_shape"),
        ({"weight": (2, 2)}, {"op": "group_norm", "num_groups": 1}, 422, "invalid_shape"),
        ({"weight": (2, 2, 2)}, {"op": "layer_norm"}, 422, "invalid_shape"),
        ({"weight": (0, 2)}, {"op": "layer_norm"}, 422, "invalid_shape"),
        ({"weight": (2, 2), "bias": (2,)}, {"op": "layer_norm"}, 422, "invalid_shape"),
        ({"weight": (65536, 1)}, {"op": "layer_norm"}, 422, "invalid_shape"),
        ({"weight": (4,)}, {"op": "layer_norm", "weight_offset": 2}, 422, "invalid_parameter"),
        ({"weight": (4,)}, {"op": "group_norm", "num_groups": 2, "weight_offset": 1}, 422, "invalid_parameter"),
        ({"weight": (0,)}, {"op": "layer_norm"}, 422, "invalid_shape"),
    ],
)
def test_what_is_no_layer_is_refused(api, name, tensors, params, status, code):
    sent = {key: torch.ones(shape) for key, shape in tensors.items()}
    assert_problem(put(api, name, sent, **params), status, code)
    assert_problem(api.get(f"/v1/layers/{name}"), 404)


def test_a_layer_is_no_npy(api, name):
    response = api.put(f"/v1/layers/{name}?op=layer_norm", content=npy(X), headers={"content-type": NPY})
    assert_problem(response, 415)


@pytest.mark.parametrize("bad", ["a%20b", "x" * 129, "%C3%A4", "a%00b", "a@b"])
def test_names_are_plain(api, bad):
    assert_problem(put(api, bad, {"weight": torch.ones(4)}, op="layer_norm"), 422, "invalid_parameter")


@pytest.mark.parametrize("beside", ["eps=1e-5", "activation=none"])
def test_a_layer_says_it_all(api, name, beside):
    put(api, name, {"weight": torch.ones(12)}, op="layer_norm")
    response = api.post(f"/v1/layer_norm?layer={name}&{beside}", content=npy(X))
    assert_problem(response, 422, "invalid_parameter")


def test_a_layer_must_fit(api, name):
    put(api, name, {"weight": torch.ones(12)}, op="layer_norm")
    sent = packed(x=torch.ones(2, 12), weight=torch.ones(12))
    beside = post(api, content=sent, params={"layer": name}, content_type=SAFETENSORS)
    assert_problem(beside, 422, "unexpected_tensor")
    assert_problem(post(api, "/v1/rms_norm", params={"layer": name}), 422, "invalid_parameter")
    wider = npy(np.ones((2, 13), np.float32))
    assert_problem(post(api, content=wider, params={"layer": name}), 422, "invalid_shape")
