"""The caller of a call, as its metadata and its connection describe it."""

from collections.abc import Iterable
from typing import Any

from normserve.codec.forwarded_for import FORWARDED_FOR, TrustedProxies
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.grpc.peer_connections import parse_peer
from normserve.ip_addresses import format_client_network

Header = tuple[bytes, bytes]
"""The name and the value of a header."""

# Metadata that the server reads as headers.
_FORWARDED = ("authorization", "traceparent", "tracestate", "x-request-id")


def make_forwarded_headers(
    peer: str, metadata: Iterable[tuple[str, Any]] | None, proxies: TrustedProxies | None = None
) -> list[Header]:
    """Make the headers that every request of a call has: the caller's address, key and trace context.

    Args:
        peer: the caller as gRPC names it, such as `ipv4:127.0.0.1:40000`.
        metadata: the call's; of a key that repeats, the first value counts.
        proxies: those that name their clients in `x-forwarded-for`; None if there are none.
    """
    given: dict[str, bytes] = {}
    forwarded_for: list[bytes] = []
    for name, value in metadata or ():
        encoded = value.encode("ascii", "replace") if isinstance(value, str) else bytes(value)
        if name in _FORWARDED and name not in given:
            given[name] = encoded
        elif name == FORWARDED_FOR.decode():
            forwarded_for.append(encoded)
    named = [(name.encode(), value) for name, value in given.items()]
    address, _ = parse_peer(peer)
    if proxies is not None and forwarded_for:
        address = proxies.find_client_address(address, forwarded_for)
    return [(GATEWAY_CALLER, address.encode("ascii", "replace")), *named]


def identify_caller(headers: Iterable[Header]) -> str:
    """Return the address, or for IPv6 the network, for which the headers of a call count its memory."""
    address = dict(headers)[GATEWAY_CALLER].decode()
    try:
        return format_client_network(address)
    except ValueError:
        return address
