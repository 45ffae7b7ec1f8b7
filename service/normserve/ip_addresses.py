"""IP addresses as sockets and headers name them: IPv4 may be mapped to IPv6."""

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Prefix length of an IPv6 client: the owner of one address usually has at least all others with the same prefix.
_IPV6_NETWORK_BITS = 64


def parse_ip_address(text: str) -> IpAddress:
    """Parse an IP address; return one of IPv4 that is mapped to IPv6 as IPv4.

    Raises:
        ValueError: the text is no IP address.
    """
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def format_client_network(text: str) -> str:
    """Return the addresses that count as one client's: an IPv4 address, or an IPv6 network as `PREFIX/64`.

    Args: text: an IP address of the client.

    Raises:
        ValueError: the text is no IP address.
    """
    address = parse_ip_address(text)
    if address.version == 4:
        return str(address)
    return str(ipaddress.IPv6Network((int(address), _IPV6_NETWORK_BITS), strict=False))
