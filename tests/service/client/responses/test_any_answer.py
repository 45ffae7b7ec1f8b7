"""Whatever a server sends, a call returns what was asked for or raises a `ClientError`."""

import asyncio
import json
import struct

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normserve import client as api
from normserve.client.responses.api_errors import make_api_error
from normserve.client.responses.api_response import ApiResponse

from tests.service.client.harness.fake_server import HEADERS, FakeServer, tensors_answer

X = np.arange(6, dtype=np.float32).reshape(2, 3)
RIGHT = tensors_answer(y=X).content
KEY = "s3cret-key"

CALLS = {
    "layer_norm": lambda client: client.layer_norm(X),
    "backward": lambda client: client.layer_norm_backward(X, X, layer="a"),
    "put_layer": lambda client: client.put_layer("a", "layer_norm", X[0]),
    "layers": lambda client: client.layers(),
    "layer": lambda client: client.layer("a"),
    "delete_layer": lambda client: client.delete_layer("a"),
    "info": lambda client: client.info(),
}

numbers = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(str),
    st.sampled_from(["9" * 400, "9" * 5000, "1e999", "-0", "", "abc", "0x10", "1_0", "soon", "\u0663"]),
)
dates = st.sampled_from(
    [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Wed, 21 Oct 2015 07:28:00 GMT",
        "Thu, 1 Jan 1 00:00 +9999",
        ",",
    ]
)
latin = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40)
media_types = st.sampled_from(
    [*[HEADERS["content-type"]] * 6, "application/json", "text/html; charset=utf-7", "\xff"]
)
stage_names = st.sampled_from(["recv", "kernel"]) | latin
stages = st.lists(st.tuples(stage_names, numbers).map(lambda pair: f"{pair[0]};dur={pair[1]}")).map(", ".join)
header_lists = st.fixed_dictionaries(
    {"content-type": media_types},
    optional={
        "server-timing": stages | latin,
        "x-kernel-bytes": numbers,
        "x-kernel-bandwidth": numbers,
        "x-batch-size": numbers,
        "x-request-id": latin,
        "retry-after": numbers | dates | latin,
        "content-length": numbers,
        "content-encoding": st.sampled_from(["gzip", "identity", "", "br, gzip", "\xff"]),
        "location": latin
        | st.sampled_from(["http://[", "//a:b:c", "http://a:99999999/", "\xff://\xff", "http://\xad"]),
        "set-cookie": latin
        | st.sampled_from(["a=b; max-age=" + "9" * 400, "a=b; expires=x", "a=b; domain=.", "=;;="]),
    },
).map(lambda headers: [(name.encode(), value.encode("utf-8")) for name, value in headers.items()])

anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=10,
)
problems = st.dictionaries(
    st.sampled_from(["code", "detail", "title", "status", "request_id", "type", "layers"]), anything
)
DEEP = b"[" * 100_000
documents = st.one_of(
    (anything | problems).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [DEEP, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"layers": [1]}', b'{"detail": "\\ud800"}', b"NaN"]
    ),
    st.sampled_from([b"9" * 5000, b'{"code": 1e999}', b"\xff", b'{"code": ["unknown_layer"]}', b'{"code": {}}']),
)


def offsets(start, stop):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [start, stop]}


payloads = st.one_of(
    st.sampled_from([RIGHT, RIGHT[:-1], RIGHT + b"0", RIGHT[:20], struct.pack("<Q", 2**63) + RIGHT]),
    st.dictionaries(st.text(st.characters(), max_size=9), anything | st.just(offsets(0, 24)), max_size=4).map(
        lambda header: struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + bytes(24)
    ),
    st.tuples(st.integers(0, len(RIGHT) - 1), st.integers(0, 255)).map(
        lambda change: RIGHT[: change[0]] + bytes([change[1]]) + RIGHT[change[0] + 1 :]
    ),
)
bodies = payloads | documents | st.binary(max_size=200)
statuses = st.sampled_from(
    [200] * 8 + [201, 204, 206, 301, 307, 304, 400, 404, 418, 429, 500, 502, 503, 504, 599, 999]
)


def check_timing(timing):
    """What a caller may rely on of any times."""
    assert timing.batch_size >= 1
    assert 0 <= timing.kernel_bytes < 2**63
    assert 0 <= timing.kernel_bandwidth < float("inf")
    assert all(0 <= duration_ms < float("inf") for duration_ms in timing.stages_ms.values())
    assert timing.request_id.isprintable()


def check(call, outcome):
    """What a caller may rely on of any result."""
    if call == "layer_norm":
        assert (outcome.y.dtype, outcome.y.shape) == (X.dtype, X.shape)
        check_timing(outcome.timing)
    elif call == "backward":
        assert outcome.dweight.shape == (3,)
    elif call == "layers":
        assert all(isinstance(layer, dict) for layer in outcome)
        json.dumps(outcome, ensure_ascii=False).encode()
    elif call in ("layer", "info"):
        json.dumps(outcome, ensure_ascii=False).encode()


def check_error(error):
    """What a caller may rely on of any error."""
    text = f"{error}{error!r}"
    assert KEY not in text
    assert text.isprintable()
    assert len(text) < 5000
    assert " at 0x" not in text
    assert error.retry_after_s is None or error.retry_after_s >= 0


# What a server asks to wait is not waited for here.
POLICY = api.RetryPolicy(tries=2, first_pause_s=0, longest_pause_s=0)


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=10)
@given(status=statuses, headers=header_lists, body=bodies)
def test_any_status_headers_and_body(call, status, headers, body):
    server = FakeServer(httpx.Response(status, headers=headers, stream=httpx.ByteStream(body)))
    with api.Client(transport=httpx.MockTransport(server), api_key=KEY, retries=POLICY) as client:
        try:
            check(call, CALLS[call](client))
        except api.ClientError as error:
            check_error(error)


LINES = st.sampled_from(
    [
        *[b"HTTP/1.1 200 OK"] * 4,
        *[b"Content-Type: application/x-safetensors", b"Content-Length: %d" % len(RIGHT)] * 4,
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Content-Length: -1",
        b"Content-Length: 1, 2",
        b"Content-Length: " + b"9" * 5000,
        b"HTTP/1.0 200 OK",
        b"HTTP/2 200",
        b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 103 Early Hints",
        b"HTTP/1.1 999 \xff",
        b"HTTP/1.1 20 OK",
        b"Set-Cookie: a=b",
        b"Location: http://elsewhere/",
        b"Connection: upgrade",
        b"X: " + b"x" * 2**17,
        b"\x00: \x00",
        b" folded",
        b"Bearer " + KEY.encode(),
        b": ",
        b"",
        b"",
        b"5\r\nhello",
        b"0",
        b"ffffffffffffffffffffff",
        RIGHT,
    ]
)


@given(
    lines=st.lists(LINES, max_size=9) | st.lists(LINES, max_size=9).map(lambda lines: [b"HTTP/1.1 200 OK", *lines]),
    end=st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]),
)
def test_any_bytes(calls_of_raw_server, lines, end):
    server, calls = calls_of_raw_server
    server.scripts = [[b"\r\n".join(lines) + end]]
    for call in calls:
        try:
            check("layer_norm", call())
        except api.ClientError as error:
            check_error(error)


@pytest.fixture
def calls_of_raw_server(raw_server):
    """A server whose script is set for each call, and a call to it from either kind of client."""
    server = raw_server([b""])
    options = {"url": server.url, "api_key": KEY, "retries": api.RetryPolicy(tries=1), "timeout_s": 5.0}
    with api.Client(**options) as client, asyncio.Runner() as runner:
        client_of_loop = api.AsyncClient(**options)

        async def call():
            return await client_of_loop.layer_norm(X)

        yield server, (lambda: client.layer_norm(X), lambda: runner.run(call()))
        runner.run(client_of_loop.close())


@given(body=bodies, status=st.integers(400, 999), headers=header_lists)
def test_any_problem_document(body, status, headers):
    error = make_api_error(status, {name.decode(): value.decode() for name, value in headers}, body, KEY)
    assert error.status == status
    check_error(error)


@given(header_lists)
def test_any_timing(headers):
    named = {name.decode(): value.decode() for name, value in headers}
    check_timing(ApiResponse(200, named, memoryview(b"")).read_timing())
