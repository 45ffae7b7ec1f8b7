"""The sender of a request."""

import functools
import ipaddress
from dataclasses import dataclass

# Of an IPv6 address: who has one has at least all others that begin alike.
_IPV6_NETWORK_BITS = 64


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The sender of a request, as far as the server knows it.

    Attributes:
        address: the client's IP address; `unix` on a Unix socket.
        key: the name of its API key, never the key itself; None where no key was given or none is asked for.
        max_inflight_bytes: of all requests with its key together; None where there is no such limit.
    """

    address: str
    key: str | None = None
    max_inflight_bytes: int | None = None

    @property
    def tenant_name(self) -> str:
        """Whose share of the server's capacity the request takes: its key's, without one its address's.

        IPv6 addresses of one /64 network are one tenant.
        """
        if self.key is not None:
            return f"key:{self.key}"
        return _format_ipv6_prefix(self.address) if ":" in self.address else self.address


@functools.lru_cache(maxsize=1024)
def make_anonymous_identity(address: str) -> ClientIdentity:
    """A caller without a key; the same object each time, since each address sends many requests."""
    return ClientIdentity(address)


@functools.lru_cache(maxsize=1024)
def _format_ipv6_prefix(address: str) -> str:
    """The tenant of an IPv6 address."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    prefix = int(parsed) >> (128 - _IPV6_NETWORK_BITS) << (128 - _IPV6_NETWORK_BITS)
    return f"{ipaddress.IPv6Address(prefix)}/{_IPV6_NETWORK_BITS}"
