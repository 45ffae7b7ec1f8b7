"""Which hosts a request may name, and which pages may send it."""

import pytest
from normserve.errors import ForbiddenOriginError, MisdirectedRequestError
from normserve.http.middleware.origin_policy import OriginPolicy, list_allowed_hosts

SCOPE = {"type": "http", "method": "POST", "scheme": "http", "path": "/v1/layer_norm", "client": ("127.0.0.1", 1)}


def admitted(origins, *, scope=None, **headers):
    """What `admit` gives for these headers; underscores in their names are dashes."""
    sent = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}
    whole = {**SCOPE, **(scope or {}), "headers": list(sent.items())}
    return origins.check_request(whole, sent)


@pytest.mark.parametrize(
    ("host", "allowed", "hosts"),
    [
        ("127.0.0.1", "", ["127.0.0.1"]),
        ("127.8.8.8", "", ["127.8.8.8"]),
        ("::1", "", ["::1"]),
        ("localhost", "", ["localhost"]),
        ("0.0.0.0", "", None),
        ("::", "", None),
        ("10.0.0.5", "", None),
        ("norm.example", "", None),
        ("127.0.0.1", "*", None),
        ("0.0.0.0", "api.example,10.0.0.5", ["api.example", "10.0.0.5"]),
    ],
)
def test_hosts_follow_the_address_unless_they_are_set(host, allowed, hosts):
    assert list_allowed_hosts(host, allowed) == hosts


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost", "localhost.", "localhost:8000", "localhost.:8000", "localhost:", "127.0.0.1:1"),
        *("[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000", "[0000::0001]"),
        *("api.example", "API.Example.:443", "10.0.0.5:80", "[2001:db8::5]", "[2001:DB8:0::5]:9"),
    ],
)
def test_allowed_hosts_in_every_spelling(host):
    origins = OriginPolicy(["api.example", "10.0.0.5", "2001:db8::5"])
    for _ in range(2):
        assert admitted(origins, host=host) == ((), None)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "localhost.evil.example",
            "evil-localhost",
            "localhost..",
            "localhost:80:80",
            "a@localhost",
        ),
        *(
            "localhost@evil",
            "localhost/evil",
            "localhost evil",
            "",
            ":8000",
            ".",
            "[::1",
            "::1",
            "[::2]",
            "127.0.0.2",
        ),
        *(
            "127.0.0.1.evil",
            "localhost:http",
            "localhost:123456",
            "l\xf6calhost",
            "[::1]evil",
            "a" * 70_000,
            "[" * 400,
        ),
    ],
)
def test_any_other_host_is_misdirected(host):
    with pytest.raises(MisdirectedRequestError, match="--allowed-hosts"):
        admitted(OriginPolicy(["127.0.0.1"]), host=host)


def test_what_answers_for_any_host_takes_any():
    assert admitted(OriginPolicy(None), host="evil.example") == ((), None)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_probes_may_name_any_host(path):
    origins = OriginPolicy(["api.example"])
    assert admitted(origins, scope={"path": path}, host="10.1.2.3:8000") == ((), None)
    with pytest.raises(MisdirectedRequestError):
        admitted(origins, host="10.1.2.3:8000")


def test_nobody_without_a_host_is_a_browser():
    assert admitted(OriginPolicy(["api.example"])) == ((), None)


def test_unix_sockets_are_exempt():
    unix = {"client": None}
    assert admitted(OriginPolicy(["api.example"]), scope=unix, host="sibling", origin="http://evil") == ((), None)


def test_known_hosts_are_few():
    """Spellings of allowed hosts are remembered, within bounds; the rest is looked at each time."""
    origins = OriginPolicy(["localhost"])
    for port in range(2000):
        admitted(origins, host=f"localhost:{port}")
    assert len(origins._accepted_hosts) == 1024


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "http"),
        ("http://localhost", "localhost:80", "http"),
        ("http://[::1]:8000", "[::1]:8000", "http"),
        ("https://api.example", "api.example", "https"),
        ("https://api.example", "api.example:443", "https"),
        ("https://api.example:8443", "API.example:8443", "https"),
        # A proxy speaks TLS before the server.
        ("https://api.example", "api.example", "http"),
    ],
)
def test_own_pages_may_send(origin, host, scheme):
    assert admitted(OriginPolicy(None), scope={"scheme": scheme}, host=host, origin=origin) == ((), None)


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("http://evil.example", "127.0.0.1:8000", "http"),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", "http"),
        ("http://127.0.0.1", "127.0.0.1:8000", "http"),
        ("http://localhost:8000", "127.0.0.1:8000", "http"),
        ("http://127.0.0.1:8000.evil.example", "127.0.0.1:8000", "http"),
        ("http://api.example", "api.example", "https"),
        ("http://api.example", "api.example:443", "http"),
        ("null", "127.0.0.1:8000", "http"),
        ("", "127.0.0.1:8000", "http"),
        ("file://", "127.0.0.1:8000", "http"),
        ("ftp://127.0.0.1:8000", "127.0.0.1:8000", "http"),
        ("http://127.0.0.1:8000 http://evil.example", "127.0.0.1:8000", "http"),
        ("http://user@127.0.0.1:8000", "127.0.0.1:8000", "http"),
        ("null", "null", "http"),
        ("http://", "", "http"),
    ],
)
def test_other_pages_may_not(origin, host, scheme):
    with pytest.raises(ForbiddenOriginError, match="--cors-origins"):
        admitted(OriginPolicy(None, ["https://app.example"]), scope={"scheme": scheme}, host=host, origin=origin)


def test_a_page_that_the_settings_allow_reads_the_answer():
    origins = OriginPolicy(None, ["https://App.Example"])
    headers, response = admitted(origins, host="api.example", origin="https://app.example")
    assert response is None
    told = dict(headers)
    assert told[b"access-control-allow-origin"] == b"https://app.example"
    assert {b"Server-Timing", b"X-Kernel-Bytes", b"X-Error-Code", b"X-Request-ID", b"Retry-After"} <= set(
        told[b"access-control-expose-headers"].split(b", ")
    )
    assert told[b"vary"] == b"Origin"
    assert b"access-control-allow-credentials" not in told


def test_without_an_origin_caches_hear_that_it_matters():
    assert admitted(OriginPolicy(None, ["https://app.example"]), host="a") == (((b"vary", b"Origin"),), None)


def preflight(**headers):
    asked = {"access_control_request_method": "POST", **headers}
    return admitted(
        OriginPolicy(None, ["https://app.example"]),
        scope={"method": "OPTIONS"},
        host="api.example",
        origin="https://app.example",
        **asked,
    )


def test_leave_is_given():
    asked = "authorization, content-type,x-request-id,traceparent, tracestate"
    _, response = preflight(access_control_request_headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "Authorization" in response.headers["access-control-allow-headers"]
    assert "Origin" in response.headers["vary"]


@pytest.mark.parametrize(
    "asked", [{"access_control_request_method": "PATCH"}, {"access_control_request_headers": "x-evil"}]
)
def test_leave_for_anything_else_is_not(asked):
    with pytest.raises(ForbiddenOriginError, match="a page may send"):
        preflight(**asked)


def test_an_options_request_that_asks_no_leave_is_a_request():
    headers, response = admitted(
        OriginPolicy(None, ["https://app.example"]),
        scope={"method": "OPTIONS"},
        host="api.example",
        origin="https://app.example",
    )
    assert response is None
    assert (b"access-control-allow-origin", b"https://app.example") in headers
