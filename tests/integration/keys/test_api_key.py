"""The optional API key."""

import httpx
import pytest

from tests.integration.harness.raw import Connection, answered, head
from tests.integration.harness.wire import X, assert_alive, assert_problem, npy

WRONG = (None, "Bearer wrong", "s3cret-key", "Basic s3cret-key", "Bearer", "Bearer s3cret-ke\xff")


@pytest.fixture(scope="module")
def locked(launched):
    return launched(env={"NORMSERVE_API_KEY": "s3cret-key"})


@pytest.fixture(scope="module")
def stranger(locked):
    with locked.client() as http:
        yield http


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("path", ["/v1/layer_norm", "/v1/layers", "/v1/info", "/v1/nope"])
def test_wrong_or_no_key_is_401(stranger, given, path):
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    response = stranger.post(path, content=npy(X), headers=headers)
    assert_problem(response, 401, "unauthorized")
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert "s3cret" not in response.text


def test_right_key_opens(locked):
    with httpx.Client(base_url=locked.url, headers={"authorization": "Bearer s3cret-key"}, verify=False) as api:
        assert_alive(api)


def asked_with(locked, value: str):
    """What a request is answered with such an Authorization, byte for byte."""
    body = npy(X)
    lines = (f"Authorization: {value}", f"Content-Length: {len(body)}")
    with Connection(locked.address) as connection:
        connection.sendall(head("/v1/layer_norm", *lines) + body)
        return connection.answer()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_scheme_of_the_key_in_any_case(locked, scheme):
    assert asked_with(locked, f"{scheme} s3cret-key").status_code == 200


@pytest.mark.parametrize(
    "value",
    ["Bearers3cret-key", "Bearer s3cret-key x", "Basic s3cret-key", "s3cret-key", "Bearer", "Bearer  "],
)
def test_other_words_for_the_key(locked, value):
    assert_problem(asked_with(locked, value), 401, "unauthorized")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/", "/docs"])
def test_probes_and_metrics_need_none(stranger, path):
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/", "/v2/health/ready", "/assets/live.js", "/metrics"])
def test_the_default_check_of_a_proxy_needs_none(locked, path):
    """HAProxy's, a request of HTTP/1.0 without Host."""
    checked = answered(locked.address, f"OPTIONS {path} HTTP/1.0\r\n\r\n".encode())
    assert checked.status_code == 204
    assert checked.headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize("path", ["/v1/layer_norm", "/v1/info", "/v1/layers/a", "/v2", "/nothing"])
def test_other_paths_say_nothing_to_it(locked, path):
    assert answered(locked.address, f"OPTIONS {path} HTTP/1.0\r\n\r\n".encode()).status_code == 401


def test_key_is_not_told(locked, until):
    until(lambda: "$NORMSERVE_API_KEY" in locked.log)
    assert "s3cret" not in locked.log
