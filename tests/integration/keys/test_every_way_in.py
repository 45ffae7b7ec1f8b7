"""Named keys on every way into the server: what a key may not do, it may do on none of them.

Which code checks a key depends on the way, on the length of the body, and on whether there are front ends and an
access log: a check that is missing in one of these places fails a test here.
"""

import json
import os
from collections.abc import Callable
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from normserve.codec import local_messages as frames

from tests.integration.harness.fleets import WEIGHT, put
from tests.integration.harness.local_wire import LocalConnection, request
from tests.integration.harness.wire import NPY, X, npy
from tests.security.keys import EVERYTHING, EXPIRED, INFER, LAYERS, METRICS, bearing, table, write_keys

# A front end sends a short body along with the header, and receives a long one into the owner's memory.
LONG = np.ones((64, 1024), np.float32)
TINY, OF_UID = "tiny-key", "key-of-a-user"
WAYS = ("tcp short", "tcp long", "tcp chunked", "tcp v2", "uds short", "uds long", "uds v2", "local")


def slow(way: str) -> str:
    """A key of one request, for each way another: what it has used up stays used up."""
    return f"slow-key {way}"


KEYS = (
    table("reader", INFER, '["infer"]')
    + table("admin", LAYERS, '["layers"]')
    + table("prometheus", METRICS, '["metrics"]')
    + table("old", EXPIRED, '["infer"]', "expires = 2020-01-01T00:00:00Z\n")
    + table("root", EVERYTHING, '["infer", "layers", "metrics"]')
    + table("tiny", TINY, '["infer"]', "max_inflight_bytes = 10\n")
    + table("of-uid", OF_UID, '["infer"]', "requests_per_second = 0.001\n")
    + "".join(
        table(f"slow.{index}", slow(way), '["infer"]', "requests_per_second = 0.001\n")
        for index, way in enumerate(WAYS)
    )
)


class Said(NamedTuple):
    """What became of a request: its status, and of an error the detail."""

    status: int
    detail: str = ""
    retry_after: str | None = None


class Entrance(NamedTuple):
    """A server, and the paths of its sockets."""

    url: str
    uds: str
    local: str

    def client(self, socket: str) -> httpx.Client:
        if socket == "uds":
            return httpx.Client(
                transport=httpx.HTTPTransport(uds=self.uds, verify=False), base_url="http://localhost", timeout=60
            )
        return httpx.Client(base_url=self.url, timeout=60, verify=False)

    def ask(self, way: str, key: str | None) -> Said:
        """Have a LayerNorm computed with a key."""
        socket, _, kind = way.partition(" ")
        if socket == "local":
            return self._ask_locally(key)
        with self.client(socket) as api:
            return _BODIES[kind](api, bearing(key))

    def _ask_locally(self, key: str | None) -> Said:
        with LocalConnection(self.local, key=key) as connection:
            grown = connection.request(frames.GrowArenaMessage(2**20))
            return _of_frame(grown if grown.status != 200 else connection.request(request(X.shape)))


def _posted(api: httpx.Client, headers: dict[str, str], content) -> Said:
    return _of_http(api.post("/v1/layer_norm", content=content, headers={**headers, "content-type": NPY}))


def _infer(api: httpx.Client, headers: dict[str, str]) -> Said:
    x = {"name": "x", "shape": [2, 12], "datatype": "FP32", "data": X.flatten().tolist()}
    return _of_http(api.post("/v2/models/layer_norm/infer", content=json.dumps({"inputs": [x]}), headers=headers))


_BODIES: dict[str, Callable[[httpx.Client, dict[str, str]], Said]] = {
    "short": lambda api, headers: _posted(api, headers, npy(X)),
    "long": lambda api, headers: _posted(api, headers, npy(LONG)),
    "chunked": lambda api, headers: _posted(api, headers, iter([npy(X)])),
    "v2": _infer,
}


def _of_http(response: httpx.Response) -> Said:
    if response.status_code == 200:
        return Said(200)
    document = response.json()
    detail = document["detail"] if "detail" in document else document["error"]
    return Said(response.status_code, detail, response.headers.get("retry-after"))


def _of_frame(answer: frames.LocalResponse) -> Said:
    problem = answer.problem or {}
    return Said(answer.status, problem.get("detail", ""), problem.get("retry_after"))


@pytest.fixture(
    scope="module",
    params=[
        ("--frontends", "0"),
        ("--frontends", "2"),
        ("--frontends", "0", "--access-log"),
        ("--frontends", "2", "--access-log"),
    ],
    ids=" ".join,
)
def entrance(request, launched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("every")
    uds, local = str(folder / "http.sock"), str(folder / "local.sock")
    keys = write_keys(folder, KEYS)
    users = f"{os.geteuid()}=of-uid"
    options = ("--uds", uds, "--local", local, "--local-users", users, "--api-keys-file", str(keys))
    return Entrance(launched(*options, *request.param).url, uds, local)


ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_a_key_does_what_it_may(entrance, way):
    for key in (INFER, EVERYTHING):
        assert entrance.ask(way, key) == Said(200)


@ways
@pytest.mark.parametrize("key", [LAYERS, METRICS])
def test_without_the_scope_nothing_is_computed(entrance, way, key):
    said = entrance.ask(way, key)
    assert said.status == 403
    assert "needs the scope infer" in said.detail


@ways
@pytest.mark.parametrize(("key", "reason"), [(EXPIRED, "expired"), ("a-guess", "not one that the server knows")])
def test_without_a_valid_key_nothing_is_computed(entrance, way, key, reason):
    said = entrance.ask(way, key)
    assert said.status == 401
    assert reason in said.detail


@pytest.mark.parametrize("way", [way for way in WAYS if way != "local"])
def test_without_a_key_nothing_is_computed(entrance, way):
    assert entrance.ask(way, None).status == 401


@ways
def test_a_key_sends_no_more_requests_than_its_rate_allows(entrance, way):
    first, second = (entrance.ask(way, slow(way)) for _ in range(2))
    # Over shared memory, the request for memory is the first.
    assert first.status == (429 if way == "local" else 200)
    assert second.status == 429
    assert "0.001 requests a second" in second.detail


@ways
def test_a_key_has_no_more_bytes_in_flight_than_it_may(entrance, way):
    said = entrance.ask(way, TINY)
    assert said.status == 413
    assert "this key's max_inflight_bytes, 10" in said.detail


def test_a_user_has_the_scope_and_the_rate_of_the_users_key(entrance):
    with LocalConnection(entrance.local) as connection:
        refused = connection.request(frames.PutLayerMessage("a", "op=rms_norm", {}))
        assert (refused.status, "needs the scope layers" in _of_frame(refused).detail) == (403, True)
        # The only request of a thousand seconds is the one for memory.
        connection.grow()
        assert "0.001 requests a second" in _of_frame(connection.request(request(X.shape))).detail


@pytest.mark.parametrize("socket", ["tcp", "uds"])
@pytest.mark.parametrize("key", [INFER, METRICS])
def test_layers_are_changed_with_the_scope_alone(entrance, socket, key):
    with entrance.client(socket) as api:
        api.headers.update(bearing(key))
        assert put(api, "refused").status_code == 403
        assert api.delete("/v1/layers/refused").status_code == 403
        api.headers.update(bearing(LAYERS))
        assert put(api, "allowed", WEIGHT).status_code in (200, 201)
        assert api.get("/v1/layers/refused").status_code == 404
