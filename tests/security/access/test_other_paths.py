"""No other way to write a request reaches what a key guards."""

import re

import httpx
import pytest

from tests.integration.harness.raw import Connection, exchange
from tests.integration.harness.wire import X, assert_alive, assert_problem, npy
from tests.security.keys import EVERYTHING, INFER, METRICS, bearing, write_keys

BODY = npy(X)

# Request targets that some server somewhere takes for /v1/layer_norm.
TARGETS = [
    "//v1/layer_norm",
    "/v1//layer_norm",
    "/v1/layer_norm/",
    "/v1/../v1/layer_norm",
    "/v1/./layer_norm",
    "/livez/../v1/layer_norm",
    "/assets/../v1/layer_norm",
    "/assets/..%2f..%2fv1%2flayer_norm",
    "/assets/%2e%2e/v1/layer_norm",
    "/v1%2flayer_norm",
    "/%76%31/layer_norm",
    "/v1/layer%5fnorm",
    "/v1/layer_norm%00",
    "/v1/layer_norm%20",
    "/v1/layer_norm;a=b",
    "/v1;a=b/layer_norm",
    "/livez;/../v1/layer_norm",
    "/V1/LAYER_NORM",
    "/v1\\layer_norm",
    "/v1/layer_norm?key=1",
    "/v1/layer_norm#livez",
    "?/v1/layer_norm",
    "http://server/v1/layer_norm",
    "http://server//v1/layer_norm",
    "http://livez/v1/layer_norm",
    "v1/layer_norm",
    "*",
]


@pytest.fixture(scope="module")
def locked(launched, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    return launched("--api-keys-file", str(keys), "--allowed-hosts", "server,livez")


def request(method: str, target: str, *lines: str, body: bytes = b"") -> bytes:
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


@pytest.mark.parametrize("target", TARGETS)
def test_no_way_to_write_a_path_does_without_the_key(locked, target):
    answer = exchange(locked.address, request("POST", target, "Content-Type: application/x-npy", body=BODY))
    assert answer.status_code in (400, 401), answer.text


@pytest.mark.parametrize("target", [*TARGETS, "/v1/layers/a", "//v1/layers/a", "/v1/layers/a/", "/v1/layers/%61"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_no_way_to_write_a_path_gives_a_key_more_than_its_scope(locked, method, target):
    lines = ["Authorization: Bearer " + METRICS, "Content-Type: application/x-npy"]
    answer = exchange(locked.address, request(method, target, *lines, body=BODY))
    assert answer.status_code in (400, 403, 404, 405), answer.text


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "PATCH", "post", "Post"])
@pytest.mark.parametrize("target", ["/v1/layer_norm", "/v1/layers/a", "/metrics", "*"])
def test_no_method_does_without_the_key(locked, method, target):
    answer = exchange(locked.address, request(method, target))
    assert answer.status_code in (400, 401)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer",
        "Authorization: Bearer ",
        "Authorization: Basic " + EVERYTHING,
        "Authorization: " + EVERYTHING,
        f"Authorization: Bearer {EVERYTHING}x",
        f"Authorization: Bearer x{EVERYTHING}",
        f"Authorization: Bearer {EVERYTHING[:-1]}",
        f"Authorization: Bearer {EVERYTHING} x",
        f"Authorization: Bearer {EVERYTHING},Bearer {EVERYTHING}",
        "Authorization: Bearer " + EVERYTHING.upper(),
        "Authorization: Bearer *",
        "X-API-Key: " + EVERYTHING,
        "X-Forwarded-Authorization: Bearer " + EVERYTHING,
        "Proxy-Authorization: Bearer " + EVERYTHING,
        "Cookie: authorization=Bearer " + EVERYTHING,
        "X-Original-URL: /livez",
        "X-Rewrite-URL: /livez",
        "X-HTTP-Method-Override: GET",
        "X-Forwarded-Prefix: /livez",
        "X-Forwarded-For: 127.0.0.1",
        "Host: sibling",
    ],
)
def test_no_header_stands_for_the_key(locked, line):
    answer = exchange(locked.address, request("GET", "/v1/info", line))
    assert answer.status_code in (400, 401)


def test_the_key_in_the_query_or_the_url_is_none(locked):
    with locked.client() as http:
        for query in ("api_key", "access_token", "authorization", "key"):
            assert_problem(http.get("/v1/info", params={query: EVERYTHING}), 401, "unauthorized")
        assert http.get("/v1/info", auth=("user", EVERYTHING)).status_code == 401


def test_a_key_opens_one_request_and_not_the_connection(locked):
    """Behind a proxy, the next request is somebody else's."""
    with Connection(locked.address) as connection:
        opened = f"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {INFER}\r\n\r\n".encode()
        for given, status in ((opened, 200), (request("GET", "/v1/info"), 401)):
            connection.sendall(given)
            assert connection.answer().status_code == status


def test_pipelined_requests_are_each_asked(locked):
    opened = f"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {INFER}\r\n\r\n".encode()
    with Connection(locked.address) as connection:
        connection.sendall(opened + request("GET", "/v1/info"))
        everything = connection.everything()
    assert re.findall(rb"HTTP/1\.1 (\d+)", everything) == [b"200", b"401"]


def test_a_refused_body_is_never_admitted(locked):
    """What nobody may send takes no memory: the head alone is answered."""
    head = b"POST /v1/layer_norm HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
    with Connection(locked.address) as connection:
        connection.sendall(head)
        assert connection.answer().status_code == 401
        with httpx.Client(base_url=locked.url, headers=bearing(METRICS), verify=False) as http:
            assert re.search(r"^normserve_inflight_bytes 0\.0$", http.get("/metrics").text, re.M)


def test_the_door_still_opens_for_the_right_key(locked):
    with httpx.Client(base_url=locked.url, headers=bearing(INFER), verify=False) as http:
        assert_alive(http)
