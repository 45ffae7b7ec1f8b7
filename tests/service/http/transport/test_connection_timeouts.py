"""When a client reads its response too slowly."""

from types import SimpleNamespace

import pytest
from normserve.http.transport import connection_timeouts as patience_module
from normserve.http.transport import transfer_progress as pace_module
from normserve.http.transport.connection_timeouts import ConnectionTimeouts, SlowReaderMonitor
from normserve.http.transport.response_sender import TLS_PORTION_BYTES, SocketResponseSender

RATE = 1000
LIMITS = ConnectionTimeouts(header_s=10, send_s=30, transfer_s=300, min_bytes_per_s=RATE, grace_s=10)
#: Progress is looked for at intervals, and a fault is looked at twice.
SLACK_S = 0.5


class Clock:
    """Time, and a loop's timers, that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[SimpleNamespace] = []

    def perf_counter(self) -> float:
        return self.now

    def call_later(self, delay_s, callback, *arguments) -> SimpleNamespace:
        timer = SimpleNamespace(when=self.now + delay_s, run=lambda: callback(*arguments))
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.when <= end]:
            timer = min(due, key=lambda each: each.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.run()
        self.now = end


class Transport:
    """Holds what the client has not read."""

    def __init__(self) -> None:
        self.unsent = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


class Stage:
    """One connection, whose responses leave in portions."""

    def __init__(self, clock: Clock, limits: ConnectionTimeouts, unseen_bytes: int) -> None:
        self.clock, self.transport = clock, Transport()
        self.watch = SlowReaderMonitor(clock, limits, self.transport, unseen_bytes=unseen_bytes)

    def response(self) -> SocketResponseSender:
        return SocketResponseSender(self.transport, self.clock, SimpleNamespace())

    def hand(self, response: SocketResponseSender | None, nbytes: int, taken: int = 0) -> None:
        """Give the transport a portion, of which the kernel takes so much at once."""
        if response is not None:
            response.pending_bytes += nbytes
        self.transport.unsent = nbytes - taken
        if self.transport.unsent:
            self.watch.start(response)

    def read(self, bytes_per_s: float, *, every_s: float = 1.0, shows: bool = True) -> float | None:
        """Read what is unsent at that rate; after how long the server gave up, if it did.

        Args: shows: the transport says what has left; else when all has.
        """
        began, left = self.clock.now, float(self.transport.unsent)
        while left > 0:
            left -= bytes_per_s * every_s
            if shows:
                self.transport.unsent = max(0, round(left))
            self.clock.advance(every_s)
            if self.transport.is_aborted:
                return self.clock.now - began
        self.transport.unsent = 0
        self.watch.stop()
        return None


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (pace_module, patience_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def stage(clock):
    return lambda limits=LIMITS, unseen_bytes=0: Stage(clock, limits, unseen_bytes)


def test_a_client_that_drips_is_given_up_after_the_grace(stage):
    there = stage()
    there.hand(there.response(), 10**6)
    assert there.read(RATE / 20, every_s=0.1) == pytest.approx(10, abs=SLACK_S)


def test_what_the_kernel_took_at_once_is_no_merit_of_the_client(stage):
    there = stage()
    there.hand(there.response(), 2 * 2**20, taken=2**20)
    assert there.read(RATE / 20, every_s=0.1) == pytest.approx(10, abs=SLACK_S)


@pytest.mark.parametrize(("times", "every_s"), [(1.05, 0.1), (2, 5)])
def test_one_that_is_fast_enough_gets_everything(stage, times, every_s):
    there = stage()
    there.hand(there.response(), 200_000)
    assert there.read(times * RATE, every_s=every_s) is None


def test_one_that_is_just_too_slow_does_not(stage):
    there = stage()
    there.hand(there.response(), 200_000)
    assert there.read(0.9 * RATE, every_s=0.1) == pytest.approx(10, abs=SLACK_S)


def test_the_pause_ends_what_was_fast(stage):
    there = stage()
    there.hand(there.response(), 10**6)
    there.clock.advance(1)
    there.transport.unsent = 100_000
    assert there.read(0) == pytest.approx(2 * LIMITS.send_s, abs=LIMITS.send_s)


def test_without_a_least_rate_drips_have_all_the_time(stage):
    there = stage(ConnectionTimeouts(header_s=10, send_s=30, transfer_s=300))
    there.hand(there.response(), 10**6)
    assert there.read(1) == pytest.approx(300, abs=1)


class TestPortions:
    """A response leaves in several; the limits are those of all of it."""

    def test_the_time_is_that_of_the_whole_response(self, stage):
        there = stage()
        response, began = there.response(), there.clock.now
        for _ in range(100):
            there.hand(response, 20_000)
            if there.read(2 * RATE) is not None:
                break
        assert there.clock.now - began == pytest.approx(300, abs=11)

    def test_so_is_the_rate(self, stage):
        there = stage()
        response, began = there.response(), there.clock.now
        for _ in range(100):
            there.hand(response, 1000)
            if there.read(RATE / 2, every_s=0.1) is not None:
                break
        assert there.clock.now - began == pytest.approx(10, abs=SLACK_S)

    def test_portions_that_were_taken_at_once_count(self, stage):
        there = stage()
        response = there.response()
        there.hand(response, 1000)
        assert there.read(RATE) is None
        there.hand(response, 19_000, taken=19_000)
        there.hand(response, 100_000)
        # One second is over, and 20 000 bytes are good for 20.
        assert there.read(1, every_s=0.1) == pytest.approx(19, abs=SLACK_S)

    def test_another_response_begins_anew(self, stage):
        there = stage()
        there.hand(there.response(), 90_000)
        assert there.read(1.5 * RATE) is None
        there.clock.advance(500)
        there.hand(there.response(), 100_000)
        assert there.read(RATE / 2, every_s=0.1) == pytest.approx(10, abs=SLACK_S)


class TestTls:
    """What leaves shows in whole portions."""

    def test_one_that_is_fast_enough_gets_everything(self, stage):
        limits = ConnectionTimeouts(header_s=10, send_s=300, transfer_s=3000, min_bytes_per_s=RATE, grace_s=10)
        there = stage(limits, TLS_PORTION_BYTES)
        response = there.response()
        for _ in range(5):
            there.hand(response, TLS_PORTION_BYTES)
            assert there.read(1.1 * RATE, shows=False) is None

    def test_one_that_is_too_slow_is_given_up_when_a_portion_should_have_left(self, stage):
        limits = ConnectionTimeouts(header_s=10, send_s=3000, transfer_s=3000, min_bytes_per_s=RATE, grace_s=10)
        there = stage(limits, TLS_PORTION_BYTES)
        there.hand(there.response(), TLS_PORTION_BYTES)
        assert there.read(RATE / 2, shows=False) == pytest.approx(TLS_PORTION_BYTES / RATE, abs=1)


def test_the_last_bytes_of_a_complete_response_are_waited_for_no_longer(stage):
    there = stage()
    there.hand(None, 16_000)
    assert there.read(1) == pytest.approx(10, abs=1)


def test_nothing_is_looked_at_once_the_kernel_has_all(stage):
    there = stage()
    there.hand(there.response(), 1000)
    there.watch.stop()
    assert there.clock.timers == []
    there.clock.advance(1000)
    assert not there.transport.is_aborted
