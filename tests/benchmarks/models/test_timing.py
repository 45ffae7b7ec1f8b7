from benchmarks.models import timing
from benchmarks.models.timing import timed_in_turn


def test_providers_are_timed_in_turn_after_a_few_calls_of_each(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(timing, "CALLS", 2)
    called = []
    times = timed_in_turn({name: lambda name=name: called.append(name) for name in "ab"})
    assert "".join(called) == "aaabbb" + "aabb" * 2
    assert times["a"].p20 <= times["a"].p50 <= times["a"].p80


def test_at_least_twenty_calls_are_timed():
    assert timing.ROUNDS * timing.CALLS >= 20
