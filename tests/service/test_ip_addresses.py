"""Addresses of IPv4 are the same, however a socket names them."""

import pytest
from normserve.ip_addresses import format_client_network, parse_ip_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:0DB8:0::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_an_address_of_ipv4_may_be_mapped(text, address):
    assert str(parse_ip_address(text)) == address


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_client_has_an_address_of_ipv4_or_a_network_of_ipv6(text, network):
    assert format_client_network(text) == network


@pytest.mark.parametrize("text", ["", "unix", "192.0.2", "192.0.2.7%eth0", "[::1]"])
def test_other_texts_are_refused(text):
    for function in (parse_ip_address, format_client_network):
        with pytest.raises(ValueError, match="address"):
            function(text)
