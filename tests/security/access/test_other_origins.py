"""Pages of other origins, and names that resolve to this machine, against a real server."""

import pytest

from tests.integration.harness.raw import answered, exchange, head
from tests.integration.harness.wire import X, assert_alive, assert_problem, npy, post

BODY = npy(X)
APP = "https://app.example"


@pytest.fixture(scope="module")
def shared(launched):
    """One that answers for a name of its own, to the pages of another; with a key."""
    return launched(
        *("--allowed-hosts", "api.example", "--cors-origins", APP), env={"NORMSERVE_API_KEY": "s3cret-key"}
    )


@pytest.fixture(scope="module")
def stranger(shared):
    with shared.client() as http:
        yield http


@pytest.mark.parametrize("path", ["/v1/layer_norm", "/", "/metrics", "/docs", "/nope", "/assets/live.js"])
def test_a_name_that_was_made_to_resolve_here_is_refused(api, path):
    assert_problem(post(api, path, host="rebound.example:8000"), 421, "misdirected_request")
    assert_problem(api.get(path, headers={"host": "rebound.example"}), 421, "misdirected_request")


def test_the_target_counts_and_not_what_the_host_line_says(server):
    length = f"Content-Length: {len(BODY)}"
    for target in ("http://rebound.example/v1/layer_norm", "HTTP://rebound.example:80/v1/layer_norm"):
        answer = exchange(server.address, head(target, length, "Connection: close") + BODY)
        assert_problem(answer, 421, "misdirected_request")
    answer = exchange(server.address, head("http://localhost/v1/layer_norm", length, "Connection: close") + BODY)
    assert answer.status_code == 200
    as_rebound = head("http://localhost/v1/layer_norm", length, "Connection: close")
    answer = exchange(server.address, as_rebound.replace(b"Host: localhost", b"Host: rebound.example") + BODY)
    assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_simple_post_of_another_page_is_refused(api, origin):
    """What a form or `fetch` sends without asking; nothing runs."""
    answer = post(api, content_type="text/plain", origin=origin)
    assert_problem(answer, 403, "forbidden_origin")
    assert "access-control-allow-origin" not in answer.headers
    deleting = api.delete("/v1/layers/a", headers={"origin": origin})
    assert_problem(deleting, 403, "forbidden_origin")


def test_own_pages_work(api):
    assert post(api, origin=str(api.base_url).rstrip("/")).status_code == 200


def test_a_large_body_of_another_page_is_not_waited_for(server):
    announced = head("/v1/layer_norm", "Content-Length: 1000000000", "Origin: http://evil.example")
    assert_problem(answered(server.address, announced), 403, "forbidden_origin")


def test_names_that_are_set_are_answered_for(stranger):
    key = {"authorization": "Bearer s3cret-key"}
    for host in ("api.example", "API.example:8443", "localhost", "127.0.0.1:80"):
        assert post(stranger, host=host, **key).status_code == 200
    assert_problem(post(stranger, host="other.example", **key), 421, "misdirected_request")


def test_probes_may_name_the_address_of_a_pod(stranger):
    for path in ("/livez", "/readyz"):
        assert stranger.get(path, headers={"host": "10.1.2.3:8000"}).status_code == 200


def test_a_browser_asks_for_leave_without_a_key(stranger):
    asked = {"origin": APP, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    answer = stranger.options("/v1/layer_norm", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in answer.headers
    assert_problem(
        stranger.options("/v1/layer_norm", headers={**asked, "origin": "http://evil.example"}),
        403,
        "forbidden_origin",
    )
    said = 'normserve_requests_total{op="preflight",pass="none",dtype="none",transport="tcp",code="200"}'
    assert said in stranger.get("/metrics").text


@pytest.mark.parametrize("key", [None, "Bearer s3cret-key"])
def test_a_page_that_is_allowed_reads_results_and_errors(stranger, key):
    headers = {} if key is None else {"authorization": key}
    answer = post(stranger, origin=APP, **headers)
    assert answer.status_code == (401 if key is None else 200)
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["vary"] == "Origin"
    assert "Server-Timing" in answer.headers["access-control-expose-headers"]
    through_the_framework = stranger.get("/v1/info", headers={"origin": APP, **headers})
    assert through_the_framework.headers["access-control-allow-origin"] == APP


def test_refusals_leave_the_server_as_it_was(api):
    assert_alive(api)
