from normserve.callers import Caller


def test_a_caller_with_a_key_shares_with_whoever_else_has_it():
    assert Caller("10.0.0.1", "team").tenant == Caller("10.0.0.2", "team").tenant


def test_a_caller_without_a_key_shares_with_its_address():
    assert Caller("10.0.0.1").tenant == Caller("10.0.0.1").tenant != Caller("10.0.0.2").tenant


def test_an_address_is_no_key():
    assert Caller("team").tenant != Caller("10.0.0.1", "team").tenant
