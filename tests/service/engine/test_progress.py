"""When a server is stalled, and when it only looks so."""

import pytest
from normserve.engine.progress import CompletionTracker, StallDetector
from normserve.errors import StalledError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return CompletionTracker(clock)


def test_without_work_nothing_stalls(progress, clock):
    assert progress.stalled_s == 0
    progress.begin_work()
    progress.end_work()
    clock.now += 100
    assert progress.stalled_s == 0


def test_time_counts_from_the_first_that_waits(progress, clock):
    clock.now += 100
    progress.begin_work()
    clock.now += 5
    progress.begin_work()
    clock.now += 5
    assert progress.stalled_s == 10


def test_whatever_is_finished_is_progress(progress, clock):
    progress.begin_work()
    for _ in range(10):
        progress.begin_work()
        clock.now += 9
        progress.end_work()
    clock.now += 1
    assert progress.stalled_s == 1


@pytest.mark.parametrize("place", ["requests", "launches"])
def test_either_of_requests_and_launches_may_stall(clock, place):
    launches = CompletionTracker(clock)
    watch = StallDetector(60, launches)
    watch.request_progress = CompletionTracker(clock)
    (launches if place == "launches" else watch.request_progress).begin_work()
    clock.now += 60
    watch.require_progress()
    clock.now += 1
    assert watch.stalled_s == 61
    with pytest.raises(StalledError, match="61 s"):
        watch.require_progress()
