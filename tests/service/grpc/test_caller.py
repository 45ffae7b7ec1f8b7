"""What the server learns of a caller."""

import pytest
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.grpc.caller import make_forwarded_headers, parse_peer_address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", "127.0.0.1"),
        ("ipv6:[::1]:40000", "::1"),
        ("ipv6:%5B::1%5D:40000", "::1"),
        ("ipv6:[fe80::1%25eth0]:40000", "fe80::1"),
        ("unix:/run/some.sock", "unix"),
        ("unix:", "unix"),
    ],
)
def test_a_peers_address(peer, address):
    assert parse_peer_address(peer) == address


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
