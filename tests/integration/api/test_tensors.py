"""Tensors that do not fit the operation or one another are refused."""

import itertools

import pytest
import torch

from tests.integration.harness.wire import SAFETENSORS, assert_problem, packed, post


@pytest.mark.parametrize(
    ("path", "tensors", "code"),
    [
        ("/v1/layer_norm", {"y": (2, 3)}, "unexpected_tensor"),
        ("/v1/layer_norm", {"weight": (3,)}, "missing_tensor"),
        ("/v1/layer_norm", {}, "missing_tensor"),
        ("/v1/layer_norm", {"x": (2, 3), "dy": (2, 3)}, "unexpected_tensor"),
        ("/v1/rms_norm", {"x": (2, 3), "bias": (3,)}, "unexpected_tensor"),
        ("/v1/rms_norm/backward", {"x": (2, 3), "dy": (2, 3), "mean": (2,)}, "unexpected_tensor"),
        ("/v1/layer_norm/backward", {"x": (2, 3)}, "missing_tensor"),
        ("/v1/layer_norm/backward", {"x": (2, 3), "dy": (2, 3), "rstd": (2,)}, "missing_tensor"),
        ("/v1/layer_norm", {"x": ()}, "invalid_shape"),
        ("/v1/layer_norm", {"x": (2, 0)}, "invalid_shape"),
        ("/v1/layer_norm", {"x": (2, 3), "weight": (2,)}, "invalid_shape"),
        ("/v1/layer_norm", {"x": (2, 3), "weight": (1, 3)}, "invalid_shape"),
        ("/v1/layer_norm", {"x": (2, 3), "bias": (4,)}, "invalid_shape"),
        ("/v1/layer_norm", {"x": (2, 3), "residual": (3,)}, "invalid_shape"),
        ("/v1/layer_norm/backward", {"x": (2, 3), "dy": (3, 2)}, "invalid_shape"),
        (
            "/v1/layer_norm/backward",
            {"x": (2, 3), "dy": (2, 3), "mean": (2, 1), "rstd": (2, 1)},
            "invalid_shape",
        ),
        ("/v1/group_norm?num_groups=2", {"x": (4,)}, "invalid_shape"),
        ("/v1/group_norm?num_groups=2", {"x": (4, 4, 0)}, "invalid_shape"),
        ("/v1/group_norm?num_groups=2", {"x": (4, 0, 3)}, "invalid_shape"),
        ("/v1/group_norm?num_groups=3&layout=nhwc", {"x": (2, 6, 4)}, "invalid_parameter"),
        *(
            (path, {"x": (2, 3), "dy": (2, 3), name: (3, 3)}, "invalid_shape")
            for path in ("/v1/layer_norm/backward", "/v1/rms_norm/backward")
            for name in ("scale", "shift")
        ),
        ("/v1/layer_norm", {"x": (2, 3), "scale": (2, 1)}, "invalid_shape"),
        ("/v1/rms_norm", {"x": (2, 3), "shift": (1, 2, 3)}, "invalid_shape"),
        ("/v1/layer_norm_chain", {"x": (2, 3), "weight.0": (3,), "scale": (2, 3)}, "unexpected_tensor"),
        ("/v1/group_norm?num_groups=2", {"x": (2, 4, 3), "scales": (2, 4)}, "unexpected_tensor"),
        ("/v1/group_norm?num_groups=2", {"x": (2, 4, 3), "dscale": (2, 4)}, "unexpected_tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(api, path, tensors, code):
    content = packed(**{name: torch.zeros(shape) for name, shape in tensors.items()})
    assert_problem(post(api, path, content, content_type=SAFETENSORS), 422, code)


SHAPES = [(), (4,), (8,), (1, 4), (3, 4), (0, 4), (2, 3), (2, 0), (2, 8), (4, 2), (2, 4, 1), (2, 1, 4), (1, 2, 4)]
OF_SAMPLES = itertools.product([("nchw", (2, 4, 3)), ("nhwc", (2, 3, 4))], ["", "/backward"], ["scale", "shift"])


@pytest.mark.parametrize(
    ("shape", "layout", "x", "direction", "name"),
    [
        (shape, *layout, direction, name)
        for shape, (layout, direction, name) in zip(2 * SHAPES, itertools.cycle(OF_SAMPLES), strict=False)
    ],
)
def test_scale_and_shift_are_of_each_samples_channels(api, shape, name, layout, x, direction):
    """Nothing is broadcast, nothing cut to size."""
    sent = {"x": x, "scale": (2, 4), "shift": (2, 4), name: shape} | ({"dy": x} if direction else {})
    content = packed(**{key: torch.zeros(size) for key, size in sent.items()})
    path = f"/v1/group_norm{direction}?num_groups=2&layout={layout}"
    response = post(api, path, content, content_type=SAFETENSORS)
    assert_problem(response, 422, "invalid_shape")
    expected, _, hint = response.json()["detail"].partition("; ")
    assert expected == f"{name} must be [2, 4], got {list(shape)}"
    other = {"nchw": "nhwc", "nhwc": "nchw"}[layout]
    assert hint == (f"with layout={other} x has 3 channels" if shape == (2, 3) else "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_scale_and_shift_are_floats(api, dtype):
    for name in ("scale", "shift"):
        content = packed(x=torch.ones(2, 4, 3), **{name: torch.ones(2, 4).to(dtype)})
        response = post(api, "/v1/group_norm?num_groups=2", content, content_type=SAFETENSORS)
        assert_problem(response, 422, "unsupported_dtype")


def test_statistics_must_be_float32(api):
    tensors = {name: torch.ones(2, 3) for name in ("x", "dy")}
    statistics = {name: torch.ones(2, dtype=torch.float16) for name in ("mean", "rstd")}
    response = post(api, "/v1/layer_norm/backward", packed(**tensors, **statistics), content_type=SAFETENSORS)
    assert_problem(response, 422, "unsupported_dtype")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(api, dtype):
    content = packed(x=torch.ones(2, 3).to(dtype))
    assert_problem(post(api, content=content, content_type=SAFETENSORS), 422, "unsupported_dtype")
