import asyncio

from normload.arrivals import ClosedLoop


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def sent(arrivals, clock, step):
    async def main():
        times = []
        while (intended := await arrivals.next()) is not None:
            times.append(intended)
            clock.now += step
        return times

    return asyncio.run(main())


def test_it_ends_after_so_many_requests():
    clock = Clock()
    assert sent(ClosedLoop(requests=3, clock=clock), clock, 1) == [100, 101, 102]


def test_it_ends_after_so_much_time():
    clock = Clock()
    assert sent(ClosedLoop(duration_s=2, clock=clock), clock, 0.5) == [100, 100.5, 101, 101.5]


def test_it_ends_when_told_to():
    clock = Clock()
    arrivals = ClosedLoop(duration_s=60, clock=clock)
    arrivals.stop()
    assert sent(arrivals, clock, 1) == []
