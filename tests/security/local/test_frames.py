"""Frames that no client would send: answered or cut off, and the server goes on."""

import json
import struct

import msgspec
import numpy as np
import pytest
from normserve.codec import local_messages as frames

from tests.integration.harness.local_wire import HALF, LocalConnection, located, request

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
PLAIN = msgspec.to_builtins(request(X.shape))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("frames") / "normserve.sock"


@pytest.fixture(scope="module")
def local(launched, path):
    return launched("--local", str(path))


@pytest.fixture
def connection(local, path):
    with LocalConnection(path) as connection:
        yield connection
        # Whatever came before: others are served.
        assert_alive(path)


def assert_alive(path) -> None:
    with LocalConnection(path) as other:
        assert other.layer_norm(X).status == 200
        np.testing.assert_allclose(other.y(X.shape).mean(1), 0, atol=1e-6)


def frame(content: bytes, tag: int = 7) -> bytes:
    return struct.pack("<II", len(content), tag) + content


NO_MESSAGES = {
    "no content": b"",
    "not JSON": b"\x93NUMPY",
    "cut off": b'{"do":"info"',
    "two": b'{"do":"info"}{"do":"info"}',
    "no object": b"7",
    "null": b"null",
    "an empty array": b"[]",
    "too many": b"[" + b",".join([b'{"do":"info"}'] * 65) + b"]",
    "nested": b"[" * 60_000,
    "nested objects": b'{"do":' * 10_000,
    "nested in a field": b'{"do":"layer","name":' + b"[" * 60_000,
    "nested in an unknown field": b'{"do":"info","x":' + b"[" * 60_000,
    "unknown message": b'{"do":"exec"}',
    "unknown field": b'{"do":"info","x":1}',
    "no UTF-8": b'{"do":"layer","name":"\xff"}',
    "half a surrogate pair": rb'{"do":"layer","name":"\ud800"}',
    "a name of megabytes": b'{"do":"layer","name":"' + b"a" * 60_000 + b'"}',
    "a negative size": b'{"do":"grow","nbytes":-1}',
    "a size beyond 63 bits": b'{"do":"grow","nbytes":9223372036854775808}',
    "a long number": b'{"do":"grow","nbytes":' + b"9" * 60_000 + b"}",
    "an infinite size": b'{"do":"grow","nbytes":1e999}',
    "NaN": b'{"do":"grow","nbytes":NaN}',
    "a fractional size": b'{"do":"grow","nbytes":1.5}',
    "a size that is true": b'{"do":"grow","nbytes":true}',
    "a size in words": b'{"do":"grow","nbytes":"1"}',
    "negative dimensions": json.dumps(
        PLAIN | {"do": "compute", "tensors": {"x": dict(PLAIN["tensors"]["x"], shape=[-1, 2])}}
    ).encode(),
    "memory of the client's own, as earlier versions took it": json.dumps(
        {"do": "own", "handle": "00" * 64, "nbytes": 4096}
    ).encode(),
    "a rank of 65": json.dumps(
        PLAIN | {"do": "compute", "tensors": {"x": dict(PLAIN["tensors"]["x"], shape=[1] * 65)}}
    ).encode(),
}


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_is_no_message_is_refused_and_the_connection_goes_on(connection, name):
    connection.socket.sendall(frame(NO_MESSAGES[name]))
    tag, answer = connection.receive()
    assert (tag, answer.status, answer.problem["code"]) == (7, 400, "malformed_payload")
    assert len(answer.problem["detail"]) < 400
    assert connection.layer_norm(X).status == 200


@pytest.mark.parametrize("length", [64 * 1024 + 1, 2**30, 2**32 - 1])
def test_a_frame_that_is_too_long_ends_the_connection(connection, length):
    connection.socket.sendall(struct.pack("<II", length, 1) + b"x" * 100)
    _, answer = connection.receive()
    assert (answer.status, answer.problem["code"]) == (413, "too_large")
    assert connection.receive() is None


def test_a_frame_of_single_bytes(connection):
    connection.grow()
    for byte in frames.encode_frame(9, request(X.shape)):
        connection.socket.sendall(bytes([byte]))
    tag, answer = connection.receive()
    assert (tag, answer.status) == (9, 200)


def test_a_frame_that_is_cut_off_leaves_nothing(connection, path, until, settled, local):
    before = settled(lambda: local.descriptors())
    with LocalConnection(path) as other:
        other.socket.sendall(frames.encode_frame(1, request(X.shape))[:-5])
    until(lambda: local.descriptors() == before)


def test_a_frame_of_many_messages_is_answered_under_tags_that_follow(connection):
    connection.grow()
    connection.array(0, 0, X.shape)[:] = X
    several = [
        msgspec.structs.replace(request(X.shape), results={"y": frames.SegmentRange(0, HALF + 1024 * number, 1024)})
        for number in range(50)
    ]
    connection.send(several, frames.TAGS - 10)
    answers = dict(connection.receive() for _ in several)
    assert answers.keys() == {(frames.TAGS - 10 + number) % frames.TAGS for number in range(50)}
    assert {answer.status for answer in answers.values()} == {200}
    results = connection.array(0, HALF, (50, 256))[:, :24]
    assert (results == results[0]).all()


def test_nothing_is_answered_before_hello(local, path):
    for message in (
        frames.GetInfoMessage(),
        frames.GrowArenaMessage(4096),
        request(X.shape),
        frames.ListLayersMessage(),
    ):
        with LocalConnection(path, greet=False) as connection:
            answer = connection.request(message)
            assert (answer.status, answer.problem["detail"]) == (400, "the first message must be hello")
            assert answer.segment is None


def test_another_version_is_refused(local, path):
    with LocalConnection(path, greet=False) as connection:
        assert connection.request(frames.HelloMessage(2)).status == 422
        assert connection.request(frames.GetInfoMessage()).status == 400


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"op": "batch_norm"}, 404, "not_found"),
        ({"direction": "sideways"}, 404, "not_found"),
        ({"query": "epsilon=1"}, 422, "invalid_parameter"),
        ({"query": "eps=1&eps=2"}, 422, "invalid_parameter"),
        ({"query": "&".join(["a=1"] * 100)}, 422, "invalid_parameter"),
        ({"query": "eps=é"}, 422, "invalid_parameter"),
        ({"tensors": {}}, 422, "missing_tensor"),
        ({"tensors": {"x": located((2, 12)), "z" * 200: located((1,))}}, 422, "unexpected_tensor"),
        ({"tensors": {"x": located((2, 12), dtype="float64")}}, 422, "unsupported_dtype"),
        ({"tensors": {"x": located((2, 12), dtype="q" * 200)}}, 422, "unsupported_dtype"),
        ({"tensors": {"x": located((2**40, 2**40, 0))}}, 400, "malformed_payload"),
        ({"results": {}}, 422, "invalid_parameter"),
        ({"query": "layer=nobody"}, 404, "unknown_layer"),
    ],
)
def test_requests_that_mean_nothing(connection, changes, status, code):
    connection.grow()
    answer = connection.request(msgspec.structs.replace(request(X.shape), **changes))
    assert (answer.status, answer.problem["code"]) == (status, code)
    assert answer.problem["request_id"] == answer.request_id
    assert "q" * 100 not in json.dumps(answer.problem)


def test_slow_frames_and_clients_that_do_not_read_are_cut_off(launched, tmp_path_factory):
    path = tmp_path_factory.mktemp("impatient") / "normserve.sock"
    impatient = launched("--local", str(path), "--header-timeout-s", "0.4", "--send-timeout-s", "0.4")
    before = impatient.resident_bytes()
    with LocalConnection(path) as slow:
        slow.socket.sendall(b"\x10\0\0\0")
        assert slow.receive() is None
    with LocalConnection(path) as deaf:
        question = frames.encode_frame(1, [frames.GetInfoMessage()] * 64)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deaf.socket.sendall(question * 10**5)
    assert impatient.resident_bytes() < before + 64 * 2**20
    assert_alive(path)
