"""Permits are taken or refused at once, and always come home."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.admission.permits import AdmissionBudget
from normserve.errors import OverloadedError, TooLargeError


@pytest.fixture
def limits() -> AdmissionBudget:
    return AdmissionBudget(max_requests=2, max_bytes=100)


def test_requests_are_counted(limits):
    first, _ = limits.acquire(0), limits.acquire(0)
    with pytest.raises(OverloadedError, match="2 requests"):
        limits.acquire(0)
    first.release()
    limits.acquire(0)


def test_bytes_are_counted_up_to_the_last(limits):
    limits.acquire(60)
    with pytest.raises(OverloadedError, match="41 more bytes"):
        limits.acquire(41)
    limits.acquire(40)
    assert (limits.request_count, limits.used_bytes) == (2, 100)


def test_refusal_takes_nothing(limits):
    with pytest.raises(OverloadedError):
        limits.acquire(101)
    assert (limits.request_count, limits.used_bytes) == (0, 0)


def test_growth_beyond_the_budget_keeps_what_was_held(limits):
    permit = limits.acquire(10)
    permit.grow(20)
    with pytest.raises(OverloadedError):
        permit.grow(71)
    assert limits.used_bytes == 30
    permit.release()
    assert limits.used_bytes == 0


def test_second_release_does_nothing(limits):
    permit = limits.acquire(10)
    permit.release()
    permit.release()
    permit.grow(5)
    assert (limits.request_count, limits.used_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 120), st.booleans())))
def test_budget_is_never_overdrawn_and_always_restored(steps):
    limits = AdmissionBudget(max_requests=3, max_bytes=100)
    held = []
    for nbytes, gives_back in steps:
        with contextlib.suppress(OverloadedError):
            held.append(limits.acquire(nbytes))
        if gives_back and held:
            held.pop(0).release()
        assert limits.request_count == len(held) <= 3
        assert limits.used_bytes == sum(permit.nbytes for permit in held) <= 100
    for permit in held:
        permit.release()
    assert (limits.request_count, limits.used_bytes) == (0, 0)


class TestWhenToComeBack:
    @pytest.fixture
    def limits(self, now) -> AdmissionBudget:
        return AdmissionBudget(max_requests=10, max_bytes=1000, clock=lambda: now[0])

    @staticmethod
    def serve(limits, now, *, requests: int, seconds_each: float, nbytes: int = 0) -> None:
        for _ in range(requests):
            permit = limits.acquire(nbytes)
            now[0] += seconds_each
            permit.release()

    @staticmethod
    def wait(limits, nbytes: int = 0) -> float:
        with pytest.raises(OverloadedError) as refused:
            limits.acquire(nbytes)
        return refused.value.retry_after_s

    def test_it_is_a_second_while_nothing_is_known(self, limits):
        for _ in range(10):
            limits.acquire(0)
        assert self.wait(limits) == 1

    def test_it_is_what_the_requests_inside_take_at_the_rate_of_late(self, limits, now):
        self.serve(limits, now, requests=100, seconds_each=0.5)
        for _ in range(10):
            limits.acquire(0)
        assert self.wait(limits) == pytest.approx(10 * 0.5, rel=0.1)

    def test_bytes_have_a_rate_of_their_own(self, limits, now):
        self.serve(limits, now, requests=100, seconds_each=1, nbytes=100)
        limits.acquire(900)
        assert self.wait(limits, 200) == pytest.approx(900 / 100, rel=0.1)

    def test_the_rate_forgets(self, limits, now):
        self.serve(limits, now, requests=1000, seconds_each=0.01)
        self.serve(limits, now, requests=60, seconds_each=2)
        for _ in range(10):
            limits.acquire(0)
        assert self.wait(limits) == pytest.approx(10 * 2, rel=0.2)

    def test_nobody_is_sent_away_for_hours(self, limits, now):
        self.serve(limits, now, requests=1, seconds_each=1)
        for _ in range(10):
            limits.acquire(0)
        now[0] += 500
        assert self.wait(limits) == 60

    def test_a_tenant_below_its_share_need_not_wait_long(self, limits, now):
        self.serve(limits, now, requests=100, seconds_each=5)
        for _ in range(10):
            limits.acquire(0, "many")
        with pytest.raises(OverloadedError) as refused:
            limits.acquire(0, "few")
        assert refused.value.retry_after_s == 1


class TestBytesOfOneTenant:
    @pytest.fixture
    def limits(self, now) -> AdmissionBudget:
        return AdmissionBudget(max_requests=4, max_bytes=1000, clock=lambda: now[0])

    def test_bytes_in_flight_are_those_of_all_its_requests(self, limits):
        first = limits.acquire(60, "team", 100)
        with pytest.raises(OverloadedError, match="max_inflight_bytes"):
            limits.acquire(41, "team", 100)
        limits.acquire(41, "others")
        first.release()
        limits.acquire(41, "team", 100)

    def test_growing_counts(self, limits):
        permit = limits.acquire(60, "team", 100)
        permit.grow(40)
        with pytest.raises(OverloadedError, match="max_inflight_bytes"):
            permit.grow(1)
        assert limits.used_bytes == 100

    def test_what_never_fits_is_too_large(self, limits):
        with pytest.raises(TooLargeError, match="max_inflight_bytes"):
            limits.acquire(101, "team", 100)
        assert (limits.request_count, limits.used_bytes) == (0, 0)
