"""Which address a request is charged to, whatever its X-Forwarded-For says."""

import pytest
from normserve.codec.forwarded_for import TrustedProxies

TRUSTED = "10.0.0.0/8,192.0.2.7,fd00::/8"


def find(peer: str, *values: bytes) -> str:
    return TrustedProxies.parse(TRUSTED).find_client_address(peer, values)


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([b"203.0.113.5"], "203.0.113.5"),
        ([b"2001:db8::1"], "2001:db8::1"),
        ([b"2001:0DB8:0::0:1"], "2001:db8::1"),
        ([b" 203.0.113.5\t"], "203.0.113.5"),
        # Proxies that are trusted are passed over, whichever network they are in.
        ([b"203.0.113.5, 10.1.1.1, 192.0.2.7,fd00::9"], "203.0.113.5"),
        ([b"203.0.113.5", b"10.1.1.1", b"10.2.2.2"], "203.0.113.5"),
        # A client may write what it likes before the address that the proxy adds.
        ([b"127.0.0.1, 203.0.113.5"], "203.0.113.5"),
        ([b"127.0.0.1", b"203.0.113.5"], "203.0.113.5"),
        ([b"10.9.9.9, 203.0.113.5, 10.1.1.1"], "203.0.113.5"),
        # Some proxies add a port.
        ([b"203.0.113.5:4711"], "203.0.113.5"),
        ([b"[2001:db8::1]:4711"], "2001:db8::1"),
        ([b"[2001:db8::1]"], "2001:db8::1"),
        # As a socket of IPv6 has addresses of IPv4.
        ([b"::ffff:203.0.113.5"], "203.0.113.5"),
        ([b"203.0.113.5, ::ffff:10.1.1.1"], "203.0.113.5"),
        # Proxies alone: the first of them began it.
        ([b"10.1.1.1, 10.2.2.2"], "10.1.1.1"),
    ],
)
def test_the_last_address_that_is_no_proxys_is_the_clients(values, client):
    assert find("10.0.0.1", *values) == client
    assert find("fd00::1", *values) == client
    assert find("::ffff:10.0.0.1", *values) == client


@pytest.mark.parametrize(
    ("peer", "value", "client"),
    [
        # Two proxies on this host, and a client that is on it, too.
        ("127.0.0.1", b"203.0.113.5, 127.0.0.1", "203.0.113.5"),
        ("127.0.0.1", b"127.0.0.3", "127.0.0.3"),
        ("::1", b"127.0.0.1", "127.0.0.1"),
        # The loopback address of another host, or one that somebody in a trusted network has made up.
        ("10.0.0.1", b"127.0.0.3", "10.0.0.1"),
        ("10.0.0.1", b"::1", "10.0.0.1"),
        ("10.0.0.1", b"::ffff:127.0.0.3", "10.0.0.1"),
        ("127.0.0.1", b"127.0.0.3, 10.0.0.7", "10.0.0.7"),
    ],
)
def test_a_loopback_address_is_this_hosts_or_nobodys(peer, value, client):
    proxies = TrustedProxies.parse("127.0.0.1,::1,10.0.0.0/8")
    assert proxies.find_client_address(peer, [value]) == client


@pytest.mark.parametrize("peer", ["203.0.113.9", "192.0.2.8", "11.0.0.1", "2001:db8::9", "::ffff:11.0.0.1", "gone"])
def test_whoever_is_no_proxy_is_not_believed(peer):
    assert find(peer, b"203.0.113.5") == peer


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b" ",
        b"unknown",
        b"_hidden",
        b"203.0.113",
        b"203.0.113.256",
        b"0x7f.0.0.1",
        b"2130706433",
        b"203.0.113.5/32",
        b"fe80::1%eth0",
        b"fe80::1%\x1b[31mred",
        b"[2001:db8::1",
        b"[2001:db8::1]x",
        b"[2001:db8::1]:",
        b"203.0.113.5:port",
        b"for=203.0.113.5",
        b"localhost",
        b"\xff\xfe",
        b"1" * 60_000,
    ],
)
def test_a_client_without_an_address_is_unknown(entry):
    assert find("10.0.0.1", entry) == "unknown"
    assert find("10.0.0.1", b"203.0.113.5, " + entry + b", 10.1.1.1") == "unknown"
    assert find("10.0.0.1", entry + b", 203.0.113.5") == "203.0.113.5"


@pytest.mark.parametrize("value", [b"fe80::1%eth0", b"unix:", b"unknown, 127.0.0.1"])
def test_a_proxy_on_this_host_does_not_lend_a_client_its_address(value):
    assert TrustedProxies.parse("127.0.0.1").find_client_address("127.0.0.1", [value]) == "unknown"


def test_a_long_list_is_read_from_its_end():
    assert find("10.0.0.1", b"9.9.9.9," * 8000 + b"203.0.113.5") == "203.0.113.5"
    assert find("10.0.0.1", b"," * 60_000) == "unknown"


@pytest.mark.parametrize(("proxies", "client"), [(31, "203.0.113.5"), (32, "10.1.1.1"), (8000, "10.1.1.1")])
def test_at_most_32_addresses_are_read(proxies, client):
    assert find("10.0.0.1", b"203.0.113.5" + b",10.1.1.1" * proxies) == client


def test_there_are_none_without_the_setting():
    assert TrustedProxies.parse("") is None


@pytest.mark.parametrize(("address", "expected"), [("10.1.2.3", True), ("fd00::1%eth0", True), ("", False)])
def test_a_connection_is_a_proxys_by_its_address(address, expected):
    assert TrustedProxies.parse(TRUSTED).is_proxy(address) is expected
