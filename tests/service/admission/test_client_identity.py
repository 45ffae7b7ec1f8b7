from normserve.admission.client_identity import ClientIdentity, make_anonymous_identity


def test_a_caller_with_a_key_shares_with_whoever_else_has_it():
    assert ClientIdentity("10.0.0.1", "team").tenant_name == ClientIdentity("10.0.0.2", "team").tenant_name


def test_a_caller_without_a_key_shares_with_its_address():
    assert (
        ClientIdentity("10.0.0.1").tenant_name
        == ClientIdentity("10.0.0.1").tenant_name
        != ClientIdentity("10.0.0.2").tenant_name
    )


def test_an_address_is_no_key():
    assert ClientIdentity("team").tenant_name != ClientIdentity("10.0.0.1", "team").tenant_name


def test_ipv6_addresses_of_one_network_are_one_tenant():
    tenants = {
        ClientIdentity(address).tenant_name for address in ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff")
    }
    assert tenants == {"2001:db8:1:2::/64"}
    assert ClientIdentity("2001:db8:1:3::1").tenant_name not in tenants


def test_ipv4_addresses_on_a_socket_of_both_kinds_stay_apart():
    assert ClientIdentity("::ffff:10.0.0.1").tenant_name == ClientIdentity("10.0.0.1").tenant_name
    assert ClientIdentity("::ffff:10.0.0.1").tenant_name != ClientIdentity("::ffff:10.0.0.2").tenant_name


def test_a_link_local_address_is_one_too():
    assert ClientIdentity("fe80::1%eth0").tenant_name == "fe80::/64"


def test_what_is_no_address_stays_what_it_is():
    assert ClientIdentity("odd:thing").tenant_name == "odd:thing"


def test_an_anonymous_caller_is_its_address():
    assert make_anonymous_identity("10.0.0.1") == ClientIdentity("10.0.0.1")
    assert make_anonymous_identity("10.0.0.1") is make_anonymous_identity("10.0.0.1")
