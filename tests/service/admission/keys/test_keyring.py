"""Keys are found by their hash, expire, and are counted by the second."""

import hashlib

import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.errors import RateLimitedError, UnauthorizedError

INFER = frozenset([KeyScope.INFER])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def key(name: str, secret: bytes, **more) -> ApiKey:
    return ApiKey(name, hashlib.sha256(secret).digest(), INFER, **more)


def test_a_key_is_found_the_first_time_and_every_other():
    ring = Keyring([key("a", b"one"), key("b", b"two")])
    assert [ring.find_by_token(token).key.name for token in (b"one", b"two", b"one")] == ["a", "b", "a"]


@pytest.mark.parametrize("token", [b"", b"on", b"one ", b"ONE", b"\xff\x00", hashlib.sha256(b"one").digest()])
def test_anything_else_is_not(token):
    ring = Keyring([key("a", b"one")])
    ring.find_by_token(b"one")
    assert ring.find_by_token(token) is None


def test_what_is_wrong_is_not_remembered():
    ring = Keyring([key("a", b"one")])
    for guess in range(1000):
        ring.find_by_token(b"%d" % guess)
    ring.find_by_token(b"one")
    assert list(ring._by_token) == [b"one"]


def test_a_key_that_is_gone_is_found_no_more_though_it_was_just_used():
    ring = Keyring([key("a", b"one")])
    ring.find_by_token(b"one")
    ring.replace_keys([key("a", b"two")])
    assert ring.find_by_token(b"one") is None
    assert ring.find_by_token(b"two").key.name == "a"
    assert ring.key_names == ["a"]


def test_the_single_key_may_do_everything():
    assert Keyring.from_secret("sécret").find_by_token("sécret".encode()).key.scopes == frozenset(KeyScope)


def test_a_key_expires_at_its_moment():
    grant = Keyring([key("a", b"one", expires=1000.0)]).find_by_token(b"one")
    grant.require_unexpired(999.9)
    with pytest.raises(UnauthorizedError, match="expired"):
        grant.require_unexpired(1000.0)


def taken(grant, count: int) -> int:
    """How many of so many requests are let through."""
    passed = 0
    for _ in range(count):
        try:
            grant.take_token()
        except RateLimitedError:
            continue
        passed += 1
    return passed


def test_a_rate_lets_through_a_second_at_once_and_then_what_time_brings(clock):
    grant = Keyring([key("a", b"one", requests_per_second=4.0)], clock).find_by_token(b"one")
    assert taken(grant, 10) == 4
    clock.now += 0.5
    assert taken(grant, 10) == 2
    clock.now += 3600
    assert taken(grant, 10) == 4


def test_a_rate_below_one_lets_one_through(clock):
    grant = Keyring([key("a", b"one", requests_per_second=0.1)], clock).find_by_token(b"one")
    assert taken(grant, 2) == 1
    with pytest.raises(RateLimitedError, match=r"may send 0\.1 requests a second") as caught:
        grant.take_token()
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now += 10
    assert taken(grant, 2) == 1


def test_keys_do_not_share_a_rate(clock):
    ring = Keyring([key("a", b"one", requests_per_second=1.0), key("b", b"two", requests_per_second=1.0)], clock)
    assert taken(ring.find_by_token(b"one"), 2) == taken(ring.find_by_token(b"two"), 2) == 1


def test_reading_the_file_again_gives_no_rate_back(clock):
    ring = Keyring([key("a", b"one", requests_per_second=2.0)], clock)
    assert taken(ring.find_by_token(b"one"), 2) == 2
    ring.replace_keys([key("a", b"new", requests_per_second=2.0)])
    assert taken(ring.find_by_token(b"new"), 2) == 0
    ring.replace_keys([key("a", b"new", requests_per_second=3.0)])
    assert taken(ring.find_by_token(b"new"), 5) == 3


def test_a_key_without_a_rate_has_none():
    assert taken(Keyring([key("a", b"one")]).find_by_token(b"one"), 1000) == 1000


def test_callers_are_told_apart_by_key_and_by_address():
    ring = Keyring([key("a", b"one", max_inflight_bytes=1000), key("b", b"two")])
    one, two = ring.find_by_token(b"one"), ring.find_by_token(b"two")
    for _ in range(2):
        for number in range(300):
            address = f"10.0.0.{number}"
            assert (one.get_identity(address).address, one.get_identity(address).key) == (address, "a")
    assert one.get_identity("10.0.0.1").max_inflight_bytes == 1000
    assert two.get_identity("10.0.0.1") == ClientIdentity("10.0.0.1", "b")


def test_addresses_are_not_remembered_without_end():
    grant = Keyring([key("a", b"one")]).find_by_token(b"one")
    for number in range(10_000):
        grant.get_identity(str(number))
    assert len(grant._identities) <= 256
