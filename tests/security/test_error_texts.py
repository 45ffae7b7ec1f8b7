"""No error text tells where something lies in memory, or of what types the server is made.

An address defeats the randomisation that other attacks have to overcome; the text of an error that a library raised
is where one slips out.
"""

import asyncio
import json
import re
import struct

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from normserve.http.app import create_app
from normserve.http.transport import AsgiAdapter
from normserve.settings import Settings

from tests.integration.harness.raw import exchange
from tests.integration.harness.wire import NPY, SAFETENSORS, X, npy, packed

TELLTALE = re.compile(
    r"0x[0-9a-f]{4,}|object at|<(class|function|bound|built-in|module|memory|_io)|Traceback|File \"|site-packages"
    r"|\.py\b|torch\.|tensor\(|numpy\.|np\.|dtype\('|normserve\.\w+\.",
    re.I,
)


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def numpy_header(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin-1").ljust(118) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


WEIGHTS = torch.ones(12)

BODIES = {
    "nothing": b"",
    "a few bytes": b"\x01\x02",
    "text": b"just some text that is long enough",
    "no JSON": safetensors(b"{" + b"\x00" * 20),
    "a list": safetensors([1, 2]),
    "deep": safetensors(b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "no UTF-8": safetensors(b'{"\xff\xfe": 1}'),
    "null": safetensors({"x": None}),
    "strange type": safetensors({"x": tensor({"a": object.__name__})}, bytes(24)),
    "float8": safetensors({"x": tensor("F8_E4M3")}, bytes(24)),
    "integers": safetensors({"x": tensor("I32")}, bytes(24)),
    "strange shape": safetensors({"x": tensor(shape=[None, {}])}, bytes(24)),
    "endless shape": safetensors({"x": tensor(shape=[2**62, 2**62, 0])}, b""),
    "negative shape": safetensors({"x": tensor(shape=[-1, 6])}, bytes(24)),
    "strange offsets": safetensors({"x": tensor(offsets="ab")}, bytes(24)),
    "beyond": safetensors({"x": tensor(offsets=[0, 10**18])}, bytes(24)),
    "short": safetensors({"x": tensor()}, bytes(8)),
    "metadata": safetensors({"__metadata__": {"a": [1]}, "x": tensor()}, bytes(24)),
    "twice": safetensors(b'{"x": 1, "x": 2}'),
    "scalar": safetensors({"x": tensor(shape=[], offsets=[0, 4])}, bytes(4)),
    "no x": packed(weight=WEIGHTS),
    "what nobody takes": packed(x=torch.ones(2, 12), other=WEIGHTS),
    "weight of another length": packed(x=torch.ones(2, 12), weight=torch.ones(5)),
    "weight of another rank": packed(x=torch.ones(2, 12), weight=torch.ones(2, 2, 3)),
    "residual of another shape": packed(x=torch.ones(2, 12), residual=torch.ones(3, 12)),
    "dy of another shape": packed(x=torch.ones(2, 12), dy=torch.ones(12, 2)),
    "mean alone": packed(x=torch.ones(2, 12), dy=torch.ones(2, 12), mean=torch.ones(2)),
    "npy of objects": numpy_header("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }"),
    "npy of structs": numpy_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }"),
    "npy that is no dict": numpy_header("__import__('os').getcwd()"),
    "npy that runs": numpy_header("{'descr': id, 'fortran_order': False, 'shape': (2,), }"),
    "npy without an end": numpy_header("{'descr': '<f4', 'shape': (2"),
    "npy of a strange shape": numpy_header("{'descr': '<f4', 'fortran_order': False, 'shape': ('a', None), }"),
    "npy of version 9": numpy_header("{}", version=b"\x09\x00"),
    "npy of doubles": npy(np.ones((2, 3))),
    "npy that is short": npy(X)[:-5],
    "npy that is long": npy(X) + b"more",
}
PATHS = ["/v1/layer_norm", "/v1/rms_norm/backward", "/v1/group_norm?num_groups=5"]
QUERIES = [
    *("eps=text", "eps=nan", "eps=1e999", "num_groups=0", "seed=99999999999999999999", "dropout=2", "layer=../a"),
    *(
        "activation=None",
        "out_dtype=object",
        "stats=maybe",
        "timeout_ms=-1",
        "%ff=%fe",
        "a&b&c",
        "eps=1&eps=2",
        "=1",
    ),
]
HEADERS = [
    {"content-type": "application/json"},
    {"content-type": "text/html; charset=\x80"},
    {"content-encoding": "gzip"},
    {"accept": "text/html"},
    {"accept": "application/x-npy;q=object"},
    {"x-request-id": "<object at 1>"},
]


def assert_tells_nothing(response: httpx.Response) -> None:
    assert response.status_code >= 400
    everything = response.text + "".join(f"{name}: {value}\n" for name, value in response.headers.items())
    assert not TELLTALE.search(everything), everything


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
def test_what_is_wrong_with_a_body(api, path, name):
    kind = NPY if "npy" in name else SAFETENSORS
    for headers in ({"content-type": kind}, {}):
        assert_tells_nothing(api.post(path, content=BODIES[name], headers=headers))


@pytest.mark.parametrize("name", sorted(BODIES.keys() - {"no x"}))
def test_what_is_wrong_with_a_layer(api, name):
    assert_tells_nothing(api.put("/v1/layers/a?op=layer_norm", content=BODIES[name]))


@pytest.mark.parametrize("query", QUERIES)
def test_what_is_wrong_with_a_query(api, query):
    for path in ("/v1/layer_norm", "/v1/group_norm"):
        assert_tells_nothing(api.post(f"{path}?{query}", content=npy(X)))
    assert_tells_nothing(api.put(f"/v1/layers/a?{query}", content=packed(weight=WEIGHTS)))


@pytest.mark.parametrize("headers", HEADERS)
def test_what_is_wrong_with_a_header(api, headers):
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    response = api.post("/v1/layer_norm?eps=0", content=npy(X), headers=sent)
    assert_tells_nothing(response)


@pytest.mark.parametrize("path", ["/nope", "/v1/layers/none", "/assets/none", "/v1/layer_norm", "/%ff%fe"])
def test_what_is_not_there(api, path):
    assert_tells_nothing(api.get(path))
    assert_tells_nothing(api.request("PATCH", path))


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http(server, request_):
    answer = exchange(server.address, request_)
    assert answer.status_code >= 400
    assert not TELLTALE.search(answer.text)


class Unprintable:
    """What has an address for a name."""


def fail() -> None:
    raise RuntimeError(f"cannot serve {Unprintable()}")


def test_what_nobody_expected():
    """The text of any exception stays in the log."""
    app: FastAPI = create_app(Settings(backend="torch"))
    app.add_api_route("/fails", fail)
    app.state.routes[0].endpoint = fail

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(AsgiAdapter(app.state.entrance))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get("/fails"), await client.post(app.state.routes[0].path)]

    for response in asyncio.run(run()):
        assert response.status_code == 500
        assert_tells_nothing(response)
