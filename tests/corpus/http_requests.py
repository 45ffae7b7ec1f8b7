"""Requests that only HTTP can carry: each route, and each fault of a header or of a body's form."""

import json

from tests.corpus.calls import PLAIN, X
from tests.integration.harness.wire import NPY, SAFETENSORS, npy, packed

_READ_ROUTES = (
    "/v1/layers",
    "/v1/layers/a",
    "/v1/info",
    "/v2",
    "/v2/",
    "/v2/models/stats",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/a/status",
    "/v2/cudasharedmemory/status",
    "/v2/cudasharedmemory/region/a/status",
    "/metrics",
    "/livez",
    "/readyz",
    "/v2/health/live",
    "/v2/health/ready",
    "/",
    "/assets/docs.js",
    "/docs",
    "/openapi.json",
    "/sample.npy",
    "/nowhere",
)
_MODELS = ("/v2/models/layer_norm", "/v2/models/layer_norm/versions/1")
_POST_ROUTES = (
    "/v1/layer_norm",
    "/v1/layer_norm/backward",
    "/v1/rms_norm",
    "/v1/rms_norm/backward",
    "/v1/group_norm",
    "/v1/group_norm/backward",
    "/v1/layer_norm_chain",
    "/v2/systemsharedmemory/unregister",
    "/v2/systemsharedmemory/region/a/unregister",
    "/v2/systemsharedmemory/region/a/register",
    "/v2/cudasharedmemory/unregister",
    "/v2/cudasharedmemory/region/a/unregister",
    "/v2/cudasharedmemory/region/a/register",
    "/v2/repository/index",
    "/v2/repository/models/a/load",
    "/v2/repository/models/a/unload",
)
ROUTES = (
    *(("GET", path) for path in _READ_ROUTES),
    *(("GET", f"{model}{what}") for model in _MODELS for what in ("", "/ready", "/config", "/stats")),
    *(("HEAD", path) for path in ("/v1/layers", "/v1/info", "/metrics", "/livez")),
    *(("POST", path) for path in _POST_ROUTES),
    *(("POST", f"{model}/infer") for model in _MODELS),
    ("PUT", "/v1/layers/a"),
    ("DELETE", "/v1/layers/a"),
    ("OPTIONS", "/v1/layer_norm"),
)
"""Methods and paths, one for each route, and what no route has."""

_NPY = npy(X.numpy())
_TENSORS = packed(x=X)
_OPERATION = "POST /v1/layer_norm"


def _request(start: str, body: bytes = b"", *lines: str, host: str = "localhost") -> bytes:
    """Return a request whose header states the length of its body."""
    head = [f"{start} HTTP/1.1", f"host: {host}", "x-request-id: ID", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _infer(header: object) -> bytes:
    return _request("POST /v2/models/layer_norm/infer", json.dumps(header).encode())


def _input(**more: object) -> dict[str, object]:
    return {"name": "x", "shape": [3, 8], "datatype": "FP32", **more}


_NPY_LINE, _TENSORS_LINE = f"content-type: {NPY}", f"content-type: {SAFETENSORS}"
_IN_REGION = {"shared_memory_region": "absent", "shared_memory_byte_size": 96}
_VALUES = X.flatten().tolist()

REQUESTS = {
    "npy": _request(_OPERATION, _NPY, _NPY_LINE),
    "npy for safetensors": _request(_OPERATION, _NPY, _NPY_LINE, f"accept: {SAFETENSORS}"),
    "compressed page": _request("GET /", b"", "accept-encoding: gzip"),
    "chunked body": (
        f"{_OPERATION} HTTP/1.1\r\nhost: localhost\r\nx-request-id: ID\r\n{_NPY_LINE}\r\n"
        f"transfer-encoding: chunked\r\n\r\n{len(_NPY):x}\r\n"
    ).encode()
    + _NPY
    + b"\r\n0\r\n\r\n",
    "HTTP/1.0": f"{_OPERATION} HTTP/1.0\r\n{_NPY_LINE}\r\ncontent-length: {len(_NPY)}\r\n\r\n".encode() + _NPY,
    "parameter twice": _request(f"{_OPERATION}?eps=0.1&eps=0.2", _NPY, _NPY_LINE),
    "origin of the server's own page": _request(_OPERATION, _NPY, _NPY_LINE, "origin: http://localhost"),
    "origin of another page": _request(_OPERATION, _NPY, _NPY_LINE, "origin: http://other.example"),
    "preflight of another page": _request(
        "OPTIONS /v1/layer_norm", b"", "origin: http://other.example", "access-control-request-method: POST"
    ),
    "another host": _request(_OPERATION, _NPY, _NPY_LINE, host="other.example"),
    "no such path": _request("GET /nowhere"),
    "no such path below v2": _request("GET /v2/nowhere"),
    "no such model": _request("POST /v2/models/absent/infer", b"{}"),
    "method of another route": _request("PUT /v1/layer_norm", _NPY, _NPY_LINE),
    "method of another route of v2": _request("DELETE /v2/models/layer_norm"),
    "representation that is not made": _request(_OPERATION, _NPY, _NPY_LINE, "accept: image/png"),
    "media type that is not read": _request(_OPERATION, _NPY, "content-type: text/plain"),
    "no body": _request(_OPERATION, b"", _TENSORS_LINE),
    "cut safetensors": _request(_OPERATION, _TENSORS[:-4], _TENSORS_LINE),
    "cut npy": _request(_OPERATION, _NPY[:-4], _NPY_LINE),
    "no JSON": _request("POST /v2/models/layer_norm/infer", b"{"),
    "no inputs": _infer({}),
    "JSON tensor": _infer({"inputs": [_input(data=_VALUES)]}),
    "too few elements": _infer({"inputs": [_input(data=_VALUES[1:])]}),
    "another datatype": _infer({"inputs": [_input(datatype="BYTES", data=["a"] * 24)]}),
    "no such region": _infer({"inputs": [_input(parameters=_IN_REGION)]}),
    "register a forbidden name": _request(
        "POST /v2/systemsharedmemory/region/a/register", json.dumps({"key": "/other", "byte_size": 64}).encode()
    ),
    "register an absent file": _request(
        "POST /v2/systemsharedmemory/region/a/register",
        json.dumps({"key": "/corpus-absent", "byte_size": 64}).encode(),
    ),
    "repository": _request("POST /v2/repository/index", b"{}"),
    "load of no layer": _request("POST /v2/repository/models/absent/load", b"{}"),
    "header that is no HTTP": b"what is this\r\n\r\n",
    "length that is no number": b"POST /v1/layer_norm HTTP/1.1\r\nhost: localhost\r\ncontent-length: one\r\n\r\n",
    "two lengths": _request(_OPERATION, _NPY, _NPY_LINE, "content-length: 1"),
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "length and encoding": _request(_OPERATION, b"", "transfer-encoding: chunked"),
    "encoding that is not read": (
        f"{_OPERATION} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n".encode()
    ),
    "header too large": _request("GET /livez", b"", "x-long: " + "x" * 200_000),
    "body too large": _request(_OPERATION, b"", _NPY_LINE).replace(b"length: 0", b"length: 99999999"),
    "header too slow": b"POST /v1/layer_norm HTTP/1.1\r\nhost: localhost\r\n",
    "body too slow": _request(_OPERATION, _NPY, _NPY_LINE)[:-4],
    "body of v2 too slow": _infer({"inputs": [_input(data=_VALUES)]})[:-4],
}
"""Bytes of requests that are answered, one on each connection."""

INCOMPLETE_REQUEST = _request(_OPERATION, PLAIN.tensors["x"].numpy().tobytes() * 100, _NPY_LINE)[:-400]
"""A request whose client leaves before the end of its body."""
