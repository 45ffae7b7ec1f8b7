"""The name of a peer, and the end of its connection."""

import socket

import pytest
from normserve.grpc.peer_connections import close_connection, parse_peer


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", ("127.0.0.1", 40000)),
        ("ipv6:[::1]:40000", ("::1", 40000)),
        ("ipv6:%5B::1%5D:40000", ("::1", 40000)),
        ("ipv6:[fe80::1%25eth0]:40000", ("fe80::1", 40000)),
        ("unix:/run/some.sock", ("unix", None)),
        ("unix:", ("unix", None)),
    ],
)
def test_a_peers_address(peer, address):
    assert parse_peer(peer) == address


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_only_the_connection_of_the_peer_is_closed(family, host):
    """A listener of IPv6 also has clients of IPv4, which gRPC names by that."""
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
        with (
            socket.create_connection(address, 5) as first,
            listener.accept()[0] as served_first,
            socket.create_connection(address, 5) as second,
            listener.accept()[0] as served_second,
        ):
            close_connection("unix:")
            close_connection(f"ipv4:127.0.0.1:{first.getsockname()[1]}")
            assert served_first.recv(1) == first.recv(1) == b""
            second.send(b"x")
            assert served_second.recv(1) == b"x"
