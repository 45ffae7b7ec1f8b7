import re

import pytest
from normserve.client.http.server_address import ServerAddress


@pytest.mark.parametrize(
    ("url", "address", "header"),
    [
        ("http://host", ServerAddress("host", 80), "host"),
        ("https://host/", ServerAddress("host", 443, is_tls=True), "host"),
        ("https://host:80", ServerAddress("host", 80, is_tls=True), "host:80"),
        ("http://[::1]:8000/a/b/?c=d", ServerAddress("::1", 8000, prefix="/a/b", query="c=d"), "[::1]:8000"),
        ("http://B\u00fccher.example:1", ServerAddress("xn--bcher-kva.example", 1), "xn--bcher-kva.example:1"),
        ("http+unix:///run/a b.sock", ServerAddress("localhost", 0, socket_path="/run/a b.sock"), "localhost"),
        ("http+unix://here.sock", ServerAddress("localhost", 0, socket_path="here.sock"), "localhost"),
        (
            "unix:///run/a.sock",
            ServerAddress("localhost", 0, socket_path="/run/a.sock", is_shared_memory=True),
            "localhost",
        ),
    ],
)
def test_a_url_says_where(url, address, header):
    assert ServerAddress.parse_url(url) == address
    assert ServerAddress.parse_url(url).host_header == header


def test_a_target_lies_below_the_url():
    assert ServerAddress.parse_url("http://h/a/?k=1").make_target("/v1/x?b=c") == "/a/v1/x?b=c&k=1"
    assert ServerAddress.parse_url("http://h?k=1").make_target("/v1/x") == "/v1/x?k=1"


@pytest.mark.parametrize(("url", "expected"), [("http://h", "/"), ("http://h?k=1", "/?k=1"), ("http://h/a", "/a")])
def test_the_target_of_the_url_itself_is_its_path_or_a_slash(url, expected):
    assert ServerAddress.parse_url(url).make_target("") == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "ftp://host",
        "http://",
        "http://h:port",
        "http+unix://",
        "http+unix:///",
        "http+unix:///a\0",
        "unix://",
        "http://h\r\n",
    ],
)
def test_what_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"the URL must be http://HOST:PORT, .* http\+unix://PATH or unix://PATH"):
        ServerAddress.parse_url(url)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-5"])
def test_a_port_that_no_socket_has_is_refused(port):
    with pytest.raises(ValueError, match="with a PORT from 1 to 65535"):
        ServerAddress.parse_url(f"http://h:{port}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000/", "[::1]:8000"])
def test_what_a_url_lacks_is_said(url):
    with pytest.raises(ValueError, match=re.escape(f"; http://{url} may be meant")):
        ServerAddress.parse_url(url)


@pytest.mark.parametrize("url", ["user:secret@host:1", "secret", "secret word:80"])
def test_nothing_that_may_be_secret_is_repeated(url):
    with pytest.raises(ValueError, match="the URL must be") as caught:
        ServerAddress.parse_url(url)
    assert "secret" not in str(caught.value)
