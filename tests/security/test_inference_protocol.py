"""Requests of the Open Inference Protocol that lie: each is refused in little time, and the server serves on."""

import json
import time

import numpy as np
import pytest
import torch

from tests.integration.harness.raw import Answer, Connection, exchange, head
from tests.integration.harness.wire import SAFETENSORS, assert_alive, packed
from tests.security.keys import EXPIRED, INFER, LAYERS, METRICS, bearing, write_keys

PATH = "/v2/models/layer_norm/infer"
X = np.linspace(-1, 1, 8, dtype=np.float32).tobytes()


def header(**said: object) -> dict[str, object]:
    x = {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    return {"inputs": [{**x, **said}]}


def body(said: object = None) -> tuple[bytes, int]:
    """A whole body, and the length of its JSON."""
    text = json.dumps(header() if said is None else said).encode()
    return text + X, len(text)


def infer(api, content: bytes, length: int | str | None, **headers: str):
    said = {} if length is None else {"inference-header-content-length": str(length)}
    return api.post(PATH, content=content, headers=said | headers)


def assert_refused(response, *statuses: int) -> None:
    assert response.status_code in statuses, response.text
    assert response.json().keys() == {"error"}


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


@pytest.fixture(scope="module")
def locked(launched, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    return launched("--api-keys-file", str(keys), "--allowed-hosts", "server,v2")


def posted(server, target: str, key: str | None, *lines: str) -> Answer:
    content, length = body()
    lines = (*lines, *(f"{name}: {value}" for name, value in bearing(key).items()))
    said = (f"Inference-Header-Content-Length: {length}", f"Content-Length: {len(content)}", "Connection: close")
    return exchange(server.address, head(target, *lines, *said) + content)


@pytest.mark.parametrize("key", [None, "a-guess", EXPIRED])
def test_inference_asks_for_a_key(locked, key):
    assert_refused(posted(locked, PATH, key), 401)


@pytest.mark.parametrize("key", [LAYERS, METRICS])
def test_a_key_that_lacks_the_scope(locked, key):
    answer = posted(locked, PATH, key)
    assert_refused(answer, 403)
    assert "needs the scope infer" in answer.json()["error"]


@pytest.mark.parametrize("change", ["load", "unload"])
def test_the_repository_is_changed_with_the_scope_of_layers_alone(locked, change):
    path = f"/v2/repository/models/layer_norm/{change}"
    for key in (INFER, METRICS):
        assert_refused(posted(locked, path, key), 403)
    assert posted(locked, path, LAYERS).status_code not in (401, 403)


# Request targets that some server somewhere takes for the one that the key guards.
SECOND_PATHS = [
    "//v2/models/layer_norm/infer",
    "/v2//models/layer_norm/infer",
    "/v2/models/layer_norm/infer/",
    "/v2/./models/layer_norm/infer",
    "/v2/health/../models/layer_norm/infer",
    "/v2/health/live/../../models/layer_norm/infer",
    "/v2/health/live;/../../models/layer_norm/infer",
    "/V2/models/layer_norm/infer",
    "/v2%2fmodels/layer_norm/infer",
    "/%76%32/models/layer_norm/infer",
    "/v2/models/layer%5fnorm/infer",
    "/v2/models/layer_norm/versions/1/infer",
    "/v2/models/layer_norm/infer?key=1",
    "/v2/models/layer_norm/infer#/v2/health/live",
    "?/v2/models/layer_norm/infer",
    "http://server/v2/models/layer_norm/infer",
    "http://v2/models/layer_norm/infer",
    "/v2/models/layer_norm%2finfer",
    "/v2/health/live/infer",
    "/v2/models/layer_norm/generate",
    "/v2/models/layer_norm/generate_stream",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/layer_norm/trace/setting",
]


@pytest.mark.parametrize("target", SECOND_PATHS)
@pytest.mark.parametrize("key", [None, METRICS])
def test_no_second_path_leads_around_the_key(locked, target, key):
    answer = posted(locked, target, key)
    assert answer.status_code in (400, 401, 403, 404, 421), answer.text
    if key is None:
        assert answer.status_code in (400, 401, 421)


SPOOFED = [
    ("X-Original-URL: /v2/health/live",),
    ("X-Rewrite-URL: /v2/health/live",),
    ("X-Forwarded-Prefix: /v2/health/live",),
    ("X-HTTP-Method-Override: GET",),
    ("Authorization-Info: infer-key",),
    ("triton-grpc-protocol: infer-key=infer-key",),
]


@pytest.mark.parametrize("lines", SPOOFED, ids=lambda each: each[0][:24])
def test_no_header_leads_around_the_key(locked, lines):
    assert_refused(posted(locked, PATH, None, *lines), 401)


def test_probes_are_open_and_nothing_beside_them(locked):
    with locked.client() as api:
        assert api.get("/v2/health/live").status_code == api.get("/v2/health/ready").status_code == 200
        for path in ("/v2", "/v2/models/layer_norm", "/v2/models/stats", "/v2/health", "/v2/health/other"):
            assert_refused(api.get(path), 401)


def test_unloading_a_layer_is_in_the_audit_trail(locked, until):
    content = packed(weight=torch.ones(4))
    headers = bearing(LAYERS) | {"content-type": SAFETENSORS}
    with locked.client() as api:
        assert (
            api.put("/v1/layers/gone", params={"op": "rms_norm"}, content=content, headers=headers).status_code
            == 201
        )
        assert api.post("/v2/repository/models/gone/unload", headers=bearing(LAYERS)).status_code == 200
        assert api.get("/v2/models/gone", headers=bearing(LAYERS)).status_code == 404

    def told() -> list[str]:
        return [
            line for line in locked.lines if "layer_change" in line and "/v2/repository/models/gone/unload" in line
        ]

    until(told)
    assert "removed" in told()[0]
