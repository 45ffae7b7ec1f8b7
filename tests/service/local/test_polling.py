"""When the event loop polls for the next request instead of sleeping."""

import asyncio
import itertools

import pytest
from normserve.engine.progress import Progress
from normserve.local import polling
from normserve.local.polling import Polling

from tests.service.local.fake_wire import played


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
    monkeypatch.setattr(polling, "time", clock)
    return clock


def iterations(begin) -> int:
    """How many iterations of the event loop do not sleep."""

    async def run():
        loop = asyncio.get_running_loop()
        planned = []
        call_soon = loop.call_soon

        def counted(callback, *arguments, **named):
            if isinstance(getattr(callback, "__self__", None), Polling):
                planned.append(callback)
            return call_soon(callback, *arguments, **named)

        loop.call_soon = counted
        begin()
        for _ in range(100):
            await asyncio.sleep(0)
        return len(planned)

    return asyncio.run(run())


def test_after_a_prompt_request_it_polls_for_a_while(clock):
    seen = iterations(lambda: Polling(Progress()).follow(clock.now, clock.now - 50e-6))
    assert 15 <= seen <= 25


def test_after_a_pause_it_sleeps(clock):
    assert iterations(lambda: Polling(Progress()).follow(clock.now, clock.now - 1e-3)) == 0


def test_several_connections_poll_as_one(clock):
    def begin():
        shared = Polling(Progress())
        for _ in range(10):
            shared.follow(clock.now, clock.now)

    assert iterations(begin) <= 40


def test_it_does_not_poll_while_requests_are_computed(clock):
    progress = Progress()
    progress.begin()
    assert iterations(lambda: Polling(progress).follow(clock.now, clock.now)) == 1


@pytest.mark.parametrize(("cores", "polls"), [(1, False), (3, False), (4, True), (64, True)])
def test_a_small_machine_has_no_core_for_it(monkeypatch, cores, polls):
    monkeypatch.setattr(polling.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert (polling.polling(Progress()) is not None) == polls


def test_a_connection_says_when_its_requests_came_and_were_answered():
    followed = []

    class Noting:
        def follow(self, received, responded):
            followed.append((received, responded))

    async def body(client):
        object.__setattr__(client.service, "polling", Noting())
        for tag in range(3):
            client.send(client.compute(), tag)
            await client.finish()

    played(body)
    assert followed[0][1] == 0.0
    for (earlier, _), (later, responded) in itertools.pairwise(followed):
        assert earlier < responded < later
