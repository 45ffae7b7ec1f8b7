"""The rate of a key's requests."""

import pytest
from normserve.admission.keys.keyring import TokenBucket


@pytest.fixture
def now() -> list[float]:
    return [100.0]


def taken(rate: TokenBucket, most: int = 100) -> int:
    """How many requests may come at once."""
    for count in range(most):
        if rate.refill_and_get_wait_s():
            return count
        rate.take_token()
    return most


@pytest.mark.parametrize(("per_second", "at_once"), [(5.0, 5), (2.5, 2), (1.0, 1), (0.1, 1)])
def test_a_seconds_requests_may_come_at_once(now, per_second, at_once):
    assert taken(TokenBucket(per_second, clock=lambda: now[0])) == at_once


@pytest.mark.parametrize("per_second", [0.1, 1.0, 4.0])
def test_in_the_long_run_there_are_so_many_a_second(now, per_second):
    rate = TokenBucket(per_second, clock=lambda: now[0])
    first = taken(rate)
    came = 0
    for _ in range(1000):
        now[0] += 0.125
        came += taken(rate)
    assert came == pytest.approx(125 * per_second, abs=1)
    now[0] += 1000
    assert taken(rate) == first


@pytest.mark.parametrize("per_second", [0.3, 1.0, 40.0])
def test_whoever_waits_as_long_as_told_is_let_in(now, per_second):
    rate = TokenBucket(per_second, clock=lambda: now[0])
    taken(rate)
    wait_s = rate.refill_and_get_wait_s()
    assert 0 < wait_s <= 1 / per_second
    now[0] += wait_s * 0.9
    assert rate.refill_and_get_wait_s() > 0
    now[0] += wait_s * 0.1 + 1e-9
    assert rate.refill_and_get_wait_s() == 0


def test_asking_costs_nothing(now):
    rate = TokenBucket(1.0, clock=lambda: now[0])
    assert [rate.refill_and_get_wait_s() for _ in range(5)] == [0.0] * 5
