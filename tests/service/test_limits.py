"""Permits are taken or refused at once, and always come home."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.errors import OverloadedError
from normserve.limits import Limits


@pytest.fixture
def limits() -> Limits:
    return Limits(max_requests=2, max_bytes=100)


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
    assert (limits.requests, limits.bytes) == (2, 100)


def test_refusal_takes_nothing(limits):
    with pytest.raises(OverloadedError):
        limits.acquire(101)
    assert (limits.requests, limits.bytes) == (0, 0)


def test_growth_beyond_the_budget_keeps_what_was_held(limits):
    permit = limits.acquire(10)
    permit.grow(20)
    with pytest.raises(OverloadedError):
        permit.grow(71)
    assert limits.bytes == 30
    permit.release()
    assert limits.bytes == 0


def test_second_release_does_nothing(limits):
    permit = limits.acquire(10)
    permit.release()
    permit.release()
    permit.grow(5)
    assert (limits.requests, limits.bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 120), st.booleans())))
def test_budget_is_never_overdrawn_and_always_restored(steps):
    limits = Limits(max_requests=3, max_bytes=100)
    held = []
    for nbytes, gives_back in steps:
        with contextlib.suppress(OverloadedError):
            held.append(limits.acquire(nbytes))
        if gives_back and held:
            held.pop(0).release()
        assert limits.requests == len(held) <= 3
        assert limits.bytes == sum(permit.nbytes for permit in held) <= 100
    for permit in held:
        permit.release()
    assert (limits.requests, limits.bytes) == (0, 0)
