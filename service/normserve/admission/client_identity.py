"""The sender of a request."""

import functools
from dataclasses import dataclass

from normserve.ip_addresses import format_client_network


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The sender of a request: its address, and the name and byte limit of its API key.

    Attributes:
        address: the client's IP address; `unix` on a Unix socket.
        key: the name of its API key, never the key itself; None if no key was given or none is
            required.
        max_inflight_bytes: limit of the bytes of all requests with its key together; None is no limit.
    """

    address: str
    key: str | None = None
    max_inflight_bytes: int | None = None

    @property
    def tenant_name(self) -> str:
        """The name of the tenant that is charged for the request: `key:NAME`, or the address of a client
        without a key.

        IPv6 addresses of one /64 network are one tenant.
        """
        if self.key is not None:
            return f"key:{self.key}"
        return _format_ipv6_tenant(self.address) if ":" in self.address else self.address


@functools.lru_cache(maxsize=1024)
def make_anonymous_identity(address: str) -> ClientIdentity:
    """Return the identity of a caller without a key, cached because each address sends many requests."""
    return ClientIdentity(address)


@functools.lru_cache(maxsize=1024)
def _format_ipv6_tenant(address: str) -> str:
    """Return the tenant's name for an IPv6 address: its /64 network, as `PREFIX/64`.

    An IPv4 address that is mapped to IPv6 is returned as IPv4, and an invalid address unchanged.
    """
    try:
        return format_client_network(address)
    except ValueError:
        return address
