"""What each method sends, and what it makes of the answer."""

import httpx
import numpy as np
import pytest
import torch
from normserve.client import BackwardResult, ForwardResult, InvalidRequestError, UnexpectedAnswerError
from normserve.client.calls import operations

from tests.service.client.harness.fake_server import HEADERS, FakeServer, problem_answer, tensors_answer

X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.ones(3, np.float16)


def test_a_forward_sends_its_tensors_and_returns_the_answers(connect):
    stats = np.array([1, 2], np.float32)
    server = FakeServer(tensors_answer(y=2 * X, residual_out=3 * X, mean=stats, rstd=stats + 1))
    result = connect(server).layer_norm(X, W, W, residual=X, eps=1e-3, stats=True)

    assert (server.request.method, server.request.url.path) == ("POST", "/v1/layer_norm")
    assert server.params == {"eps": "0.001", "stats": "true"}
    assert server.request.headers["content-type"] == "application/x-safetensors"
    assert int(server.request.headers["content-length"]) == len(server.request.content)
    assert "transfer-encoding" not in server.request.headers
    assert server.tensors.keys() == {"x", "weight", "bias", "residual"}
    np.testing.assert_array_equal(server.tensors["weight"], W)

    assert isinstance(result, ForwardResult)
    np.testing.assert_array_equal(result.y, 2 * X)
    np.testing.assert_array_equal(result.residual_out, 3 * X)
    np.testing.assert_array_equal(result.rstd, result.mean + 1)
    assert result.y.flags.writeable


def test_a_backward_sends_its_tensors_and_returns_the_gradients(connect):
    server = FakeServer(tensors_answer(dx=X, dweight=W, dbias=W + 1))
    rows = np.zeros(2, np.float32)
    result = connect(server).layer_norm_backward(
        X, X, W, W, mean=rows, rstd=rows, residual=X, dresidual_out=X, dropout=0.5, seed=-7
    )
    assert server.request.url.path == "/v1/layer_norm/backward"
    assert server.params == {"dropout": "0.5", "seed": "-7"}
    assert server.tensors.keys() == {
        *("x", "dy", "weight", "bias", "mean", "rstd", "residual", "dresidual_out"),
    }
    assert isinstance(result, BackwardResult)
    np.testing.assert_array_equal(result.dbias, result.dweight + 1)


def test_a_group_norm_sends_scale_and_shift_and_returns_their_gradients(connect):
    scale, shift = np.ones((2, 3), np.float16), np.zeros((2, 3), np.float32)
    server = FakeServer(tensors_answer(y=X), tensors_answer(dx=X, dscale=2 * scale, dshift=shift + 3))
    client = connect(server)
    client.group_norm(X, 3, scale=scale, shift=shift)
    assert server.params == {"num_groups": "3"}
    assert server.tensors.keys() == {"x", "scale", "shift"}
    result = client.group_norm_backward(X, X, 3, scale=scale, shift=torch.from_numpy(shift))
    assert server.tensors.keys() == {"x", "dy", "scale", "shift"}
    np.testing.assert_array_equal(server.tensors["scale"], scale)
    np.testing.assert_array_equal(result.dscale, 2 * scale)
    assert isinstance(result.dshift, torch.Tensor)
    assert (result.dshift == 3).all()
    assert (result.dweight, result.dbias) == (None, None)


def test_a_gate_has_a_gradient_and_so_has_the_residual(connect):
    x, gate = np.ones((2, 3, 4), np.float32), np.ones((2, 4), np.float16)
    server = FakeServer(tensors_answer(dx=x, dresidual=3 * x, dgate=2 * gate))
    result = connect(server).layer_norm_backward(x, x, residual=x, gate=gate)
    assert server.tensors.keys() == {"x", "dy", "residual", "gate"}
    np.testing.assert_array_equal(result.dgate, 2 * gate)
    np.testing.assert_array_equal(result.dresidual, 3 * x)


def test_what_was_not_asked_for_is_none(connect):
    result = connect(FakeServer(tensors_answer(y=X))).rms_norm(X)
    assert (result.residual_out, result.mean, result.rstd) == (None, None, None)
    result = connect(FakeServer(tensors_answer(dx=X))).rms_norm_backward(X, X)
    names = ("dweight", "dbias", "dscale", "dshift", "dgate", "dresidual")
    assert [getattr(result, name) for name in names] == [None] * len(names)


@pytest.mark.parametrize(
    ("method", "arguments", "path", "params"),
    [
        ("rms_norm", {"out_dtype": "float16"}, "/v1/rms_norm", {"out_dtype": "float16"}),
        ("rms_norm", {"out_dtype": torch.float16}, "/v1/rms_norm", {"out_dtype": "float16"}),
        ("rms_norm", {"out_dtype": np.dtype("f4")}, "/v1/rms_norm", {"out_dtype": "float32"}),
        (
            "layer_norm",
            {"layer": "ln.1", "timeout_ms": 5},
            "/v1/layer_norm",
            {"layer": "ln.1", "timeout_ms": "5"},
        ),
        ("layer_norm", {"eps": np.float64(1e-5)}, "/v1/layer_norm", {"eps": "1e-05"}),
        (
            "group_norm",
            {"num_groups": 4, "layout": "nhwc", "activation": "silu"},
            "/v1/group_norm",
            {"num_groups": "4", "layout": "nhwc", "activation": "silu"},
        ),
        ("rms_norm_backward", {"dy": X}, "/v1/rms_norm/backward", {}),
        ("group_norm_backward", {"dy": X, "num_groups": 2}, "/v1/group_norm/backward", {"num_groups": "2"}),
    ],
)
def test_every_operation_has_its_path_and_parameters(connect, method, arguments, path, params):
    name = "dx" if method.endswith("backward") else "y"
    server = FakeServer(tensors_answer(**{name: X.astype(params.get("out_dtype", X.dtype))}))
    getattr(connect(server), method)(x=X, **arguments)
    assert server.request.url.path == path
    assert server.params == params


def test_an_out_dtype_that_is_no_dtype_is_left_to_the_server_to_refuse(connect):
    server = FakeServer(problem_answer(422, "invalid_parameter"))
    with pytest.raises(InvalidRequestError, match="invalid_parameter"):
        connect(server).layer_norm(X, out_dtype=3)
    assert server.params == {"out_dtype": "3"}


def test_timing_is_what_the_headers_say(connect):
    timing = connect(FakeServer()).layer_norm(X).timing
    assert timing.stages_ms == {
        "recv": 1.5,
        "queue": 0.25,
        "copy_in": 0,
        "kernel": 0.0123456,
        "copy_out": 0.002,
    }
    assert timing.kernel_bytes == 4096
    assert timing.kernel_bandwidth == 3.2e12
    assert timing.batch_size == 3
    assert timing.request_id == "abc"


def test_of_server_timing_the_durations_are_read(connect):
    answer = tensors_answer(y=X)
    answer.headers["server-timing"] = "cache;desc=7;dur=5, cdn;desc=3, miss, kernel; dur=0.5;desc=2, bad;dur=soon"
    assert connect(FakeServer(answer)).layer_norm(X).timing.stages_ms == {"cache": 5, "kernel": 0.5}


def test_durations_as_the_server_writes_them_are_read(connect):
    answer = tensors_answer(y=X)
    durations = {"recv": 0.000000001, "queue": 12.5, "copy_in": 0.0, "kernel": 86_400_000.25, "copy_out": 3.0}
    answer.headers["server-timing"] = ", ".join([f"{stage};dur={ms:.9f}" for stage, ms in durations.items()])
    assert connect(FakeServer(answer)).layer_norm(X).timing.stages_ms == durations


def test_timing_that_cannot_be_is_left_out(connect):
    answer = tensors_answer(y=X)
    answer.headers["server-timing"] = "a;dur=nan, b;dur=inf, c;dur=-1, d;dur=0"
    answer.headers.update({"x-kernel-bytes": "9" * 19, "x-kernel-bandwidth": "1e999", "x-batch-size": "0"})
    timing = connect(FakeServer(answer)).layer_norm(X).timing
    assert timing.stages_ms == {"d": 0}
    assert (timing.kernel_bytes, timing.kernel_bandwidth, timing.batch_size) == (0, 0.0, 1)


def test_a_media_type_may_be_written_in_other_ways(connect):
    for media_type in ("application/vnd.safetensors", "Application/X-Safetensors; v=1"):
        answer = tensors_answer(y=X)
        answer.headers["content-type"] = media_type
        assert (connect(FakeServer(answer)).layer_norm(X).y == X).all()


@pytest.mark.parametrize("status", [201, 202, 204, 206, 299])
def test_a_success_of_another_kind_is_unexpected(connect, status):
    answer = httpx.Response(status, headers=HEADERS, content=tensors_answer(y=X).content)
    with pytest.raises(UnexpectedAnswerError, match=f"status must be 200, or an error, got {status}"):
        connect(FakeServer(answer)).layer_norm(X)


def test_nobody_is_asked_to_compress(connect):
    server = FakeServer()
    connect(server).layer_norm(X)
    assert server.request.headers["accept-encoding"] == "identity"


def test_an_answer_without_timing_is_an_answer(connect):
    answer = tensors_answer(y=X)
    for name in HEADERS.keys() - {"content-type"}:
        del answer.headers[name]
    assert connect(FakeServer(answer)).layer_norm(X).timing.stages_ms == {}


@pytest.mark.parametrize("body", [b"", b"<html>", b"\x02\0\0\0\0\0\0\0{}"])
def test_an_answer_that_is_no_normserves_is_unexpected(connect, body):
    headers = {"content-type": "application/x-safetensors"}
    with pytest.raises(UnexpectedAnswerError):
        connect(FakeServer(httpx.Response(200, headers=headers, content=body))).layer_norm(X)
    with pytest.raises(UnexpectedAnswerError):
        connect(FakeServer(httpx.Response(200, content=body))).layer_norm(X)
    with pytest.raises(UnexpectedAnswerError):
        connect(FakeServer(httpx.Response(302, headers={"location": "/"}))).layer_norm(X)


def test_layers_are_registered_shown_and_forgotten(connect):
    described = {"name": "ln/1", "op": "layer_norm"}
    server = FakeServer(
        problem_answer(422, "invalid_shape"),
        httpx.Response(201, json=described),
        httpx.Response(200, json=described),
    )
    client = connect(server)
    with pytest.raises(InvalidRequestError):
        client.put_layer("ln/1", "layer_norm", W)
    assert client.put_layer("ln/1", "group_norm", W, W, eps=1e-4, num_groups=3, activation="silu") is True
    assert server.request.method == "PUT"
    assert server.request.url.raw_path.startswith(b"/v1/layers/ln%2F1?")
    assert server.params == {"op": "group_norm", "eps": "0.0001", "num_groups": "3", "activation": "silu"}
    assert server.tensors.keys() == {"weight", "bias"}
    assert client.put_layer("ln/1", "layer_norm", W) is False
    assert client.layer("ln/1") == described
    assert client.info() == described
    assert server.request.url.path == "/v1/info"


def test_layers_are_listed(connect):
    server = FakeServer(httpx.Response(200, json={"layers": [{"name": "a"}, {"name": "b"}]}))
    assert [layer["name"] for layer in connect(server).layers()] == ["a", "b"]


def test_a_layer_is_deleted(connect):
    server = FakeServer(httpx.Response(204))
    assert connect(server).delete_layer("a") is None
    assert (server.request.method, server.request.url.path) == ("DELETE", "/v1/layers/a")


def test_layers_of_a_chain_are_a_list():
    with pytest.raises(TypeError, match=r"^layers must be a list of names, got the str 'norm'; \['norm'\] is"):
        operations.layer_norm_chain(np.zeros((2, 3), np.float32), layers="norm")
