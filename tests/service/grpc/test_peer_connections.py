"""The name of a peer, and the end of its connection."""

import asyncio
import socket

import pytest
from normserve.grpc import peer_connections
from normserve.grpc.peer_connections import ConnectionCloser, close_connections, parse_peer


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", ("127.0.0.1", 40000)),
        ("ipv6:[::1]:40000", ("::1", 40000)),
        ("ipv6:%5B::1%5D:40000", ("::1", 40000)),
        ("ipv6:[fe80::1%25eth0]:40000", ("fe80::1", 40000)),
        ("unix:/run/some.sock", ("unix", None)),
        ("unix:", ("unix", None)),
        ("vsock:2:40000", ("unknown", None)),
        ("", ("unknown", None)),
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
            close_connections(["unix:", f"ipv4:127.0.0.1:{first.getsockname()[1]}"])
            assert served_first.recv(1) == first.recv(1) == b""
            second.send(b"x")
            assert served_second.recv(1) == b"x"


def test_connections_that_are_due_together_are_closed_together(monkeypatch):
    """Each call whose response is not read gives its peer to be closed."""
    closed = []
    monkeypatch.setattr(peer_connections, "_CLOSE_INTERVAL_S", 0.01)
    monkeypatch.setattr(peer_connections, "close_connections", closed.append)

    async def close_twice():
        closer = ConnectionCloser()
        for place in range(1000):
            closer.close_soon(f"ipv4:127.0.0.1:{place % 4}")
        await asyncio.sleep(0.05)
        closer.close_soon("ipv4:127.0.0.1:9")
        await asyncio.sleep(0.05)

    asyncio.run(close_twice())
    assert closed == [{f"ipv4:127.0.0.1:{port}" for port in range(4)}, {"ipv4:127.0.0.1:9"}]
