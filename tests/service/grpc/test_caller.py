"""What the server learns of a caller."""

import pytest
from normserve.codec.forwarded_for import TrustedProxies
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.grpc.caller import make_forwarded_headers


def test_only_what_the_server_reads_is_forwarded():
    metadata = [
        ("authorization", "Bearer one"),
        ("authorization", "Bearer two"),
        ("traceparent", "00-1-2-03"),
        ("content-length", "7"),
        (GATEWAY_CALLER.decode(), "10.0.0.1"),
        ("x-request-id", b"binary"),
    ]
    assert make_forwarded_headers("ipv4:10.0.0.9:5", metadata) == [
        (GATEWAY_CALLER, b"10.0.0.9"),
        (b"authorization", b"Bearer one"),
        (b"traceparent", b"00-1-2-03"),
        (b"x-request-id", b"binary"),
    ]


@pytest.mark.parametrize(
    ("peer", "trusted", "caller"),
    [
        ("ipv4:10.0.0.9:5", "10.0.0.0/8", b"203.0.113.5"),
        ("ipv6:[fd00::9]:5", "10.0.0.0/8,fd00::/8", b"203.0.113.5"),
        ("ipv4:10.0.0.9:5", "", b"10.0.0.9"),
        ("ipv4:11.0.0.9:5", "10.0.0.0/8", b"11.0.0.9"),
        ("unix:", "10.0.0.0/8", b"unix"),
    ],
)
def test_a_trusted_proxy_names_the_caller(peer, trusted, caller):
    metadata = [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-for", "203.0.113.5, 10.1.1.1")]
    proxies = TrustedProxies.parse(trusted)
    assert make_forwarded_headers(peer, metadata, proxies) == [(GATEWAY_CALLER, caller)]
