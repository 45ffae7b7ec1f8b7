"""Probes, metrics, information, paths and methods."""

import re

import pytest
import torch

from tests.integration.harness.wire import SAFETENSORS, assert_alive, assert_problem, post


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/v1/info", "/docs", "/openapi.json", "/"])
def test_is_there_for_get_and_head(api, path):
    got, head = api.get(path), api.head(path)
    assert got.status_code == head.status_code == 200
    assert head.content == b""
    assert "x-request-id" in got.headers


def test_info_tells_what_runs(api):
    info = api.get("/v1/info").json()
    assert info["backend"] == "torch"
    assert info["device"]["kind"] == "cpu"
    assert info["copy_bandwidth_bytes_per_second"] > 1e8
    assert info["versions"]["torch"] == torch.__version__
    assert info["limits"]["max_body_bytes"] == 2**30


def test_log_and_metrics_name_the_backend(server, api):
    assert "backend torch on " in server.log
    assert re.search(r'^normserve_build_info\{.*backend="torch".*\} 1\.0$', api.get("/metrics").text, re.M)


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/", "/v1/batch_norm", "/v1/layer_norm/"])
def test_unknown_paths(api, path):
    assert_problem(api.get(path), 404, "not_found")


def test_methods(api):
    response = api.get("/v1/layer_norm")
    assert_problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "OPTIONS, POST"
    assert_problem(api.patch("/v1/layers/a"), 405)
    options = api.options("/v1/layers/a")
    assert options.status_code == 204
    assert options.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"
    assert_problem(api.options("/nope"), 404)


def test_description_holds_every_parameter(api):
    paths = api.get("/openapi.json").json()["paths"]
    described = {p["name"] for p in paths["/v1/group_norm"]["post"]["parameters"]}
    assert {"eps", "num_groups", "layout", "stats", "layer", "timeout_ms"} <= described
    assert SAFETENSORS in paths["/v1/rms_norm/backward"]["post"]["requestBody"]["content"]


def test_description_names_every_tensor(api):
    paths = api.get("/openapi.json").json()["paths"]

    def tensors(path: str) -> set[str]:
        return set(re.findall(r"^- `(\w+)`: ", paths[path]["post"]["requestBody"]["description"], re.M))

    assert tensors("/v1/rms_norm") == {"x", "weight", "scale", "shift", "gate", "residual"}
    assert tensors("/v1/layer_norm") == {"x", "weight", "bias", "scale", "shift", "gate", "residual"}
    assert tensors("/v1/group_norm") == {"x", "weight", "bias", "scale", "shift", "residual"}
    of_backward = {"dy", "mean", "rstd", "dresidual_out"}
    assert tensors("/v1/group_norm/backward") == tensors("/v1/group_norm") | of_backward
    assert tensors("/v1/rms_norm/backward") == tensors("/v1/rms_norm") | of_backward - {"mean"}


def test_strangers_add_no_series(api, settled):
    def series():
        lines = api.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    for path in ("/x0", "/v1/y0"):
        api.get(path)
        api.request("BREW", path)
    before = settled(series)
    for index in range(30):
        api.get(f"/x{index}?layer=l{index}", headers={"x-request-id": f"r{index}"})
        api.request("BREW", f"/v1/y{index}")
    assert series() == before
    assert any('op="__unmatched__"' in line for line in before)


def test_deadline_that_has_passed(api):
    assert_problem(post(api, params={"timeout_ms": "0.000001"}), 504, "deadline_exceeded")
    assert_alive(api)
