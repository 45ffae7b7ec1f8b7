import pytest

from benchmarks.models import suite
from benchmarks.models.suite import time_in_turns


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(suite, "ROUNDS", 2)
    monkeypatch.setattr(suite, "CALLS", 2)
    monkeypatch.setattr(suite, "MOST_ROUNDS", 5)


def order_of_calls(call_ms, monkeypatch):
    called = []
    monkeypatch.setattr(suite, "_measure_wall_ms", lambda call: call() or call_ms)
    times = time_in_turns({name: lambda name=name: called.append(name) for name in "ab"})
    assert times["a"].p50 == call_ms
    return "".join(called)


def test_providers_are_timed_in_turn_after_a_few_calls_of_each(monkeypatch):
    assert order_of_calls(suite.SECONDS * 1e3, monkeypatch) == "aaabbb" + "aabb" * 2


def test_short_passes_are_timed_more_often(monkeypatch):
    assert order_of_calls(suite.SECONDS * 1e3 / 8, monkeypatch) == "aaabbb" + "aabb" * 4


def test_the_shortest_passes_end_after_the_most_rounds(monkeypatch):
    assert order_of_calls(0.001, monkeypatch) == "aaabbb" + "aabb" * 5


def test_of_no_provider_there_is_nothing_to_time():
    assert time_in_turns({}) == {}


def test_at_least_twenty_calls_are_timed(monkeypatch):
    monkeypatch.undo()
    assert suite.ROUNDS * suite.CALLS >= 20
