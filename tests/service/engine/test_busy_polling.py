"""When the event loop polls for the next message instead of sleeping."""

import asyncio

import pytest
from normserve.engine import busy_polling as module
from normserve.engine.busy_polling import BusyPoller
from normserve.engine.progress import CompletionTracker


class Clock:
    """Goes on by 10 microseconds each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += 10e-6
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def iterations(begin) -> int:
    """How many iterations of the event loop do not sleep."""

    async def run():
        loop = asyncio.get_running_loop()
        planned = []
        call_soon = loop.call_soon

        def counted(callback, *arguments, **named):
            if isinstance(getattr(callback, "__self__", None), BusyPoller):
                planned.append(callback)
            return call_soon(callback, *arguments, **named)

        loop.call_soon = counted
        begin()
        for _ in range(100):
            await asyncio.sleep(0)
        return len(planned)

    return asyncio.run(run())


def exchange(polling, clock, pause_s) -> None:
    """A message is sent, another one comes after a pause and is answered."""
    polling.record_sent()
    clock.now += pause_s
    polling.record_received()
    polling.record_sent()


def test_after_a_prompt_message_it_polls_for_a_while(clock):
    seen = iterations(lambda: exchange(BusyPoller(), clock, 50e-6))
    assert 15 <= seen <= 25


def test_after_a_pause_it_sleeps(clock):
    assert iterations(lambda: exchange(BusyPoller(), clock, 1e-3)) == 0


def test_several_connections_poll_as_one(clock):
    def begin():
        shared = BusyPoller()
        for _ in range(10):
            exchange(shared, clock, 0)

    assert iterations(begin) <= 40


def test_it_does_not_poll_while_requests_are_computed(clock):
    progress = CompletionTracker()
    progress.begin_work()
    assert iterations(lambda: exchange(BusyPoller(progress), clock, 0)) == 1
    progress.end_work()
    assert iterations(lambda: exchange(BusyPoller(progress), clock, 0)) > 10


@pytest.mark.parametrize(("cores", "polls"), [(1, False), (2, True), (64, True)])
def test_one_core_is_left_to_the_other_process(monkeypatch, cores, polls):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert (module.make_busy_poller() is not None) == polls
