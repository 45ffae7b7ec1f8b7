"""The header by which a proxy names the client whose request it forwards."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Self

from normserve.ip_addresses import IpAddress, parse_ip_address

FORWARDED_FOR = b"x-forwarded-for"
"""The name of the header, in lower case.

Its value is a list of addresses, to which each proxy appends the one that it received the request from.
"""

UNKNOWN_CLIENT = "unknown"
"""Stands for the address of a client that a trusted proxy names by something else than an address."""

# More proxies than any request passes: each entry costs time, before the client's key is checked.
_MAX_ENTRIES = 32

_WITH_PORT = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")


class TrustedProxies:
    """The networks of the proxies that the server believes when they name a client."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Args: networks: addresses, each alone or with the length of its prefix."""
        self._networks = [ipaddress.ip_network(each) for each in networks]

    @classmethod
    def parse(cls, setting: str) -> Self | None:
        """Make the proxies of the setting `trusted_proxies`; return None if it is empty."""
        return cls(setting.split(",")) if setting else None

    def is_proxy(self, address: str) -> bool:
        """Return whether a connection from this IP address comes from a trusted proxy."""
        parsed = _parse_address(address.partition("%")[0])
        return parsed is not None and self._is_trusted(parsed)

    def find_client_address(self, peer: str, values: Iterable[bytes]) -> str:
        """Return the address of the client that sent a request, or `unknown`.

        At most 32 addresses are read, from the last to the first, as long as each is a trusted proxy's: all others
        before them may be the client's invention.  A loopback address that a proxy on another host has received
        ends the list, too: it is none of this host.  The client is unknown if an entry that is read is no address:
        the proxy that wrote it may be on this host, and its client elsewhere.

        Args:
            peer: the address that the connection comes from.
            values: those of all header fields `X-Forwarded-For`, in their order.
        """
        sender = _parse_address(peer.partition("%")[0])
        if sender is None or not self._is_trusted(sender):
            return peer
        client = peer
        for entry in reversed(b",".join(values).rsplit(b",", _MAX_ENTRIES)[-_MAX_ENTRIES:]):
            address = _parse_address(entry.decode("latin-1").strip(" \t"))
            if address is None:
                return UNKNOWN_CLIENT
            if address.is_loopback and not sender.is_loopback:
                break
            client, sender = str(address), address
            if not self._is_trusted(address):
                break
        return client

    def _is_trusted(self, address: IpAddress) -> bool:
        return any(address in network for network in self._networks)


def _parse_address(text: str) -> IpAddress | None:
    """Parse an IP address, which may have a port; return None if it is none.

    One with a zone is none: the zone may be any text.
    """
    if (with_port := _WITH_PORT.fullmatch(text)) is not None:
        text = with_port[1] or with_port[2]
    if "%" in text:
        return None
    try:
        return parse_ip_address(text)
    except ValueError:
        return None
