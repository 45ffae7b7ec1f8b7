"""Requests of the Open Inference Protocol that lie: each is refused in little time, and the server serves on."""

import json
import time

import pytest

from tests.integration.harness.raw import Connection, exchange, head
from tests.integration.harness.wire import assert_alive
from tests.security.oip.requests import PATH, assert_refused, body, header


def infer(api, content: bytes, length: int | str | None, **headers: str):
    said = {} if length is None else {"inference-header-content-length": str(length)}
    return api.post(PATH, content=content, headers=said | headers)


@pytest.fixture(autouse=True)
def alive_afterwards(api):
    yield
    assert_alive(api)


def test_the_honest_one(api):
    assert infer(api, *body()).status_code == 200


LENGTHS = [
    *("-1", "-0", "+5", "1e2", "0x40", "", " ", "a", "1.5", "NaN", "\xb2"),
    *(str(n) for n in (2**31, 2**32, 2**32 + 100, 2**63 - 1, 2**63, 2**64, 2**64 + 100, 10**400)),
]


@pytest.mark.parametrize("length", LENGTHS, ids=lambda each: ascii(each[:20]))
def test_a_length_of_the_json_that_lies(server, length):
    content, _ = body()
    lines = (f"Inference-Header-Content-Length: {length}", f"Content-Length: {len(content)}", "Connection: close")
    answer = exchange(server.address, head(PATH, *lines) + content)
    assert_refused(answer, 400, 413)


@pytest.mark.parametrize("off_by", [-60, -1, 1, 32])
def test_a_length_of_the_json_that_is_not_where_it_ends(api, off_by):
    content, length = body()
    assert_refused(infer(api, content, length + off_by), 400)


def test_the_length_comes_twice(server):
    """The last of a field that comes twice counts, wherever it is read."""
    content, length = body()
    lines = ("Inference-Header-Content-Length: 5", f"Inference-Header-Content-Length: {length}")
    request = head(PATH, *lines, f"Content-Length: {len(content)}", "Connection: close") + content
    assert exchange(server.address, request).status_code == 200


SIZES = [
    {"parameters": {"binary_data_size": 2**32 + 32}},
    {"parameters": {"binary_data_size": 2**64 + 32}},
    {"parameters": {"binary_data_size": -32}},
    {"parameters": {"binary_data_size": 31}},
    {"shape": [2**32 + 2, 4]},
    {"shape": [2**31, 2**31, 2**2]},
    {"shape": [2**62, 2**62, 0]},
    {"shape": [2**64 + 2, 4]},
    {"shape": [-2, -4]},
    {"shape": [2, 5]},
    {"datatype": "FP16"},
    {"shape": [1] * 5000},
]


@pytest.mark.parametrize("said", SIZES, ids=lambda each: str(each)[:50])
def test_sizes_that_wrap_or_disagree(api, said):
    assert_refused(infer(api, *body(header(**said))), 400)


def test_two_inputs_for_the_same_bytes(api):
    first, second = header()["inputs"][0], {**header()["inputs"][0], "name": "residual"}
    assert_refused(infer(api, *body({"inputs": [first, second]})), 400)


NESTED = [
    b'{"inputs":[{"name":"x","shape":[2,4],"datatype":"FP32","data":' + b"[" * 2_000_000,
    b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 900_000 + b"]" * 900_000 + b"}]}",
    b'{"parameters":' + b'{"a":' * 500_000,
    b"[" * 4_000_000,
]


@pytest.mark.parametrize("content", NESTED, ids=range(len(NESTED)))
def test_json_that_nests_deep(api, content):
    assert_refused(infer(api, content, None), 400)


MANY = [
    {"inputs": [{"name": f"x{n}", "shape": [0], "datatype": "FP32", "data": []} for n in range(20_000)]},
    {**header(), "outputs": [{"name": f"y{n}"} for n in range(50_000)]},
    {**header(), "outputs": [{"name": "y"}] * 50_000},
    {**header(), "parameters": {f"p{n}": n for n in range(100_000)}},
]


@pytest.mark.parametrize("said", MANY, ids=["inputs", "outputs", "the same output", "parameters"])
def test_thousands_of_names(api, said):
    began = time.monotonic()
    assert_refused(infer(api, *body(said)), 400, 413, 422)
    assert time.monotonic() - began < 5


def test_names_that_come_twice(api):
    x = header()["inputs"][0]
    assert_refused(infer(api, *body({"inputs": [x, x]})), 400)
    assert_refused(infer(api, *body({**header(), "outputs": [{"name": "y"}, {"name": "y"}]})), 400)


def test_a_long_name_is_not_repeated(api):
    for said in (header(name="a" * 100_000), {**header(), "parameters": {"a" * 100_000: 1}}):
        response = infer(api, *body(said))
        assert_refused(response, 422)
        assert len(response.content) < 1000


def test_much_json_is_refused_unread(server):
    with Connection(server.address) as connection:
        connection.sendall(head(PATH, f"Content-Length: {2**29}", f"Inference-Header-Content-Length: {2**28}"))
        assert_refused(connection.answer(), 413)


def test_a_chunked_body_of_json_that_gets_too_long(server):
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with Connection(server.address) as connection:
        connection.sendall(head(PATH, "Transfer-Encoding: chunked") + chunk * 80 + b"0\r\n\r\n")
        assert_refused(connection.answer(), 413)


def chunked(content: bytes, length: int) -> bytes:
    lines = (f"Inference-Header-Content-Length: {length}", "Transfer-Encoding: chunked", "Connection: close")
    return head(PATH, *lines) + b"".join(b"1\r\n%c\r\n" % each for each in content) + b"0\r\n\r\n"


def test_chunks_of_one_byte(server):
    """Elsewhere each chunk took a place on the stack."""
    content, length = body()
    assert exchange(server.address, chunked(content, length)).status_code == 200


def test_hundreds_of_thousands_of_chunks(server):
    before = server.resident_bytes()
    content, length = body()
    assert_refused(exchange(server.address, chunked(content + bytes(400_000), length)), 400)
    assert server.resident_bytes() - before < 64 * 2**20


def test_numbers_in_json_are_bounded_in_memory(server, api):
    before = server.resident_bytes()
    text = b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":[' + b"0," * 2_000_000 + b"0]}]}"
    for _ in range(3):
        assert_refused(infer(api, text, None), 400)
    assert server.resident_bytes() - before < 256 * 2**20


def test_a_long_answer_is_not_made_as_json(api):
    rows = 2**18 // 64 + 1
    x = {"name": "x", "shape": [rows, 64], "datatype": "FP16", "parameters": {"binary_data_size": rows * 128}}
    text = json.dumps({"inputs": [x]}).encode()
    assert_refused(infer(api, text + bytes(rows * 128), len(text)), 413)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip"])
def test_compressed_bodies(api, encoding):
    content, length = body()
    assert_refused(infer(api, content, length, **{"content-encoding": encoding}), 415)


NAMES = [
    "..",
    "%2e%2e",
    "a%2fb",
    "a%00",
    "a" * 5000,
    "layer_norm%20",
    "LAYER_NORM",
    "%ff",
    "layer_norm;a",
    "{name}",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda each: each[:20])
@pytest.mark.parametrize("rest", ["", "/config", "/stats", "/infer", "/versions/1"])
def test_names_that_are_no_model(server, name, rest):
    method = "POST" if rest == "/infer" else "GET"
    request = f"{method} /v2/models/{name}{rest} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(server.address, request.encode())
    assert answer.status_code in (400, 404, 405), answer.text
    assert answer.json().keys() == {"error"}
