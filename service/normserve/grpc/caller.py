"""The caller of a call, as its metadata and its connection describe it."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from normserve.codec.gateway_header import GATEWAY_CALLER

Header = tuple[bytes, bytes]
"""The name and the value of a header."""

# Metadata that the server reads as headers.
_FORWARDED = ("authorization", "traceparent", "tracestate", "x-request-id")


def make_forwarded_headers(peer: str, metadata: Iterable[tuple[str, Any]] | None) -> list[Header]:
    """Make the headers that every request of a call has: the caller's address, key and trace context.

    Args:
        peer: the caller as gRPC names it, such as `ipv4:127.0.0.1:40000`.
        metadata: the call's; of a key that repeats, the first value counts.
    """
    given: dict[str, bytes] = {}
    for name, value in metadata or ():
        if name in _FORWARDED and name not in given:
            given[name] = value.encode("ascii", "replace") if isinstance(value, str) else bytes(value)
    named = [(name.encode(), value) for name, value in given.items()]
    return [(GATEWAY_CALLER, parse_peer_address(peer).encode("ascii", "replace")), *named]


def parse_peer_address(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer, or `unix`."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "unix"
    return rest.rpartition(":")[0].strip("[]").partition("%")[0]
