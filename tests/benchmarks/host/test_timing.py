import gc

import pytest

from benchmarks.host import timing
from benchmarks.host.timing import time_call_loop, time_queued_calls


class FakeDevice:
    def __init__(self):
        self.events = []

    def synchronize(self):
        self.events.append("w")

    def queue_busy_work(self, seconds):
        assert seconds > 0
        self.events.append("b")

    def call(self):
        assert not gc.isenabled()
        self.events.append("c")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(timing, "CALLS", 6)
    monkeypatch.setattr(timing, "AT_ONCE", 3)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    return FakeDevice()


def test_queued_calls_are_made_while_the_device_is_busy_in_short_queues(device):
    assert time_queued_calls(device.call, device).p50 > 0
    assert "".join(device.events) == "wbccc" * 5 + "w"


def test_a_loop_is_timed_to_the_end_of_its_work(device):
    assert time_call_loop(device.call, device).p50 > 0
    assert "".join(device.events) == "wccccccw" * 2
    assert gc.isenabled()


def test_queues_stay_below_what_a_device_takes():
    assert timing.CALLS % timing.AT_ONCE == 0
    assert timing.AT_ONCE * 20 <= 1024
