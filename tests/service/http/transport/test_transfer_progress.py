"""When a body is too slow."""

import pytest
from normserve.http.transport.transfer_progress import TransferProgress


@pytest.fixture
def pace() -> TransferProgress:
    return TransferProgress(began_at=100.0, max_pause_s=30, max_total_s=300, min_bytes_per_s=1000, grace_s=10)


def ended(pace: TransferProgress, bytes_per_s: float, *, every_s: float) -> float | None:
    """After how long a body is ended of which a piece comes every so often; looks are taken when they must be."""
    now, look = pace.began_at, pace.began_at
    while now < pace.began_at + 1000:
        now = look
        received = int((now - pace.began_at) // every_s * every_s * bytes_per_s)
        if pace.update_and_check(now, received) is not None:
            return now - pace.began_at
        wait_s = pace.compute_next_check_s(now, received)
        assert wait_s > 0
        look = now + wait_s
    return None


def test_single_bytes_keep_no_body_alive(pace):
    assert ended(pace, 1 / 11, every_s=11) == pytest.approx(10)


def test_nor_does_a_large_piece_for_long(pace):
    assert pace.update_and_check(100.1, 20_000) is None
    assert pace.compute_next_check_s(100.1, 20_000) == pytest.approx(19.9)
    assert pace.update_and_check(119.9, 20_001) is None
    assert "less than 1000 bytes a second" in pace.update_and_check(120.1, 20_002)


def test_the_rate_counts_after_a_while(pace):
    assert pace.update_and_check(109.9, 0) is None
    assert pace.update_and_check(110.1, 0) is not None


@pytest.mark.parametrize("bytes_per_s", [1010, 5000, 1e9])
def test_a_body_that_is_just_fast_enough_has_all_its_time(pace, bytes_per_s):
    assert ended(pace, bytes_per_s, every_s=0.01) == pytest.approx(300)


def test_a_body_that_is_just_too_slow_is_ended(pace):
    assert ended(pace, 900, every_s=0.01) == pytest.approx(10)


@pytest.mark.parametrize("min_bytes_per_s", [0, 1])
def test_a_pause_ends_even_what_was_fast(min_bytes_per_s):
    pace = TransferProgress(
        began_at=100.0, max_pause_s=30, max_total_s=300, min_bytes_per_s=min_bytes_per_s, grace_s=10
    )
    assert pace.update_and_check(105.0, 10**9) is None
    assert pace.update_and_check(134.9, 10**9) is None
    assert "no more of the body came for 30 s" in pace.update_and_check(135.0, 10**9)


def test_without_a_least_rate_single_bytes_have_all_the_time():
    pace = TransferProgress(began_at=100.0, max_pause_s=30, max_total_s=300)
    assert ended(pace, 1 / 11, every_s=11) == pytest.approx(300)


def test_it_is_looked_at_seldom(pace):
    """However close a body is to the least rate."""
    assert pace.update_and_check(149.999, 50_000) is None
    assert pace.compute_next_check_s(149.999, 50_000) == pytest.approx(0.1)
