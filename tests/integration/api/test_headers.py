"""What every response carries, and what a success tells."""

import re

import pytest
import torch

from tests.integration.harness.wire import SAFETENSORS, X, packed, post

STAGES = ("recv", "queue", "copy_in", "kernel", "copy_out")


def test_success_tells_where_time_went(api):
    response = post(api)
    entries = dict(item.split(";dur=") for item in response.headers["server-timing"].split(", "))
    assert tuple(entries) == STAGES
    for duration in entries.values():
        assert re.fullmatch(r"\d+\.\d{6,}", duration)
    assert float(entries["kernel"]) > 0
    assert response.headers["x-batch-size"] == "1"
    assert int(response.headers["x-kernel-bytes"]) == 2 * X.nbytes
    expected = 2 * X.nbytes / (float(entries["kernel"]) / 1000)
    assert float(response.headers["x-kernel-bandwidth"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("tensors", "path", "expected"),
    [
        (("x",), "/v1/layer_norm", 2 * 48),
        (("x", "residual"), "/v1/layer_norm", 4 * 48),
        (("x", "dy"), "/v1/layer_norm/backward", 3 * 48),
        (("x", "dy", "residual", "dresidual_out"), "/v1/rms_norm/backward", 5 * 48),
    ],
)
def test_kernel_bytes_are_the_fewest(api, tensors, path, expected):
    content = packed(**{name: torch.ones(2, 12, dtype=torch.float16) for name in tensors})
    response = post(api, path, content, content_type=SAFETENSORS)
    assert int(response.headers["x-kernel-bytes"]) == expected


def test_sane_request_id_comes_back(api):
    assert post(api, x_request_id="job-7.a_b").headers["x-request-id"] == "job-7.a_b"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä", "<script>"])
def test_other_request_ids_are_replaced(api, given):
    identifier = post(api, x_request_id=given.encode()).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", identifier)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("HEAD", "/v1/layers/nobody", 404, "unknown_layer"),
        ("GET", "/v1/layer_norm", 405, "method_not_allowed"),
        ("POST", "/v1/layer_norm?eps=-1", 422, "invalid_parameter"),
        ("POST", "/v2/models/layer_norm/infer", 400, "malformed_payload"),
        ("GET", "/v2/models/nobody", 404, "not_found"),
    ],
)
def test_the_code_of_an_error_is_a_header(api, method, path, status, code):
    response = api.request(method, path)
    assert (response.status_code, response.headers["x-error-code"]) == (status, code)


def test_a_result_has_no_code_of_an_error(api):
    assert "x-error-code" not in post(api).headers


def test_request_ids_are_unique(api):
    assert len({post(api).headers["x-request-id"] for _ in range(5)}) == 5
