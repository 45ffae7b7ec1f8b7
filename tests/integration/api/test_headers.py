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


def test_request_ids_are_unique(api):
    assert len({post(api).headers["x-request-id"] for _ in range(5)}) == 5
