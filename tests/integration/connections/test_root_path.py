"""`--root-path`: a proxy that leaves its own prefix in the requests."""

import pytest

from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import X, assert_problem, npy

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module", params=[(), ("--frontends", "2")], ids=["one process", "front ends"])
def below(launched, request):
    server = launched("--root-path", "/norm/one", "--api-key", "secret", *request.param)
    with server.client() as http:
        http.server = server
        yield http


@pytest.mark.parametrize("prefix", ["/norm/one", ""])
def test_requests_are_answered_with_the_prefix_and_without(below, prefix):
    assert below.get(f"{prefix}/readyz").status_code == 200
    assert below.get(f"{prefix}/docs").status_code == 200
    assert below.get(f"{prefix}/").headers["content-type"].startswith("text/html")
    for path in ("/v1/layer_norm", "/v1/layer_norm?eps=1e-3"):
        assert below.post(prefix + path, content=npy(X), headers=KEY).status_code == 200
    assert below.put(f"{prefix}/v1/layers/..%2Fx", headers=KEY).status_code in (400, 404, 422)


@pytest.mark.parametrize("prefix", ["/norm/one", ""])
def test_a_key_is_needed_with_the_prefix_and_without(below, prefix):
    assert_problem(below.post(f"{prefix}/v1/layer_norm", content=npy(X)), 401, "unauthorized")
    assert_problem(below.get(f"{prefix}/v1/info"), 401, "unauthorized")


@pytest.mark.parametrize(
    "target",
    [
        "/norm/one",
        "/norm/onev1/info",
        "/norm/v1/info",
        "/other/norm/one/v1/info",
        "/norm/one/norm/one/v1/info",
        "/norm%2Fone/v1/info",
    ],
)
def test_what_only_resembles_the_prefix_is_no_route(below, target):
    with Connection(below.server.address) as connection:
        # The second has the bytes of the first, and is not parsed.
        for _ in range(2):
            connection.sendall(head(target, "Authorization: Bearer secret", "Content-Length: 1") + b"x")
            assert_problem(connection.answer(), 404, "not_found")


def test_the_prefix_is_removed_once(below):
    body = npy(X)
    request = head("/norm/one/v1/layer_norm", "Authorization: Bearer secret", f"Content-Length: {len(body)}") + body
    with Connection(below.server.address) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert connection.answer().status_code == 200
