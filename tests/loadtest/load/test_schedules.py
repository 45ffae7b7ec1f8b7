import itertools
import math

import numpy as np
import pytest
from normload.load.scenarios import LoadPhase
from normload.load.schedules import ArrivalGenerator, ClosedLoopSchedule, OpenLoopSchedule

POISSON = LoadPhase("a", "poisson", 20.0, rate=500.0)
CONSTANT = LoadPhase("b", "constant", 2.0, rate=4.0)


def draws(seed=0, shares=(1, 3)):
    return ArrivalGenerator((seed, 1), shares)


def taken(arrivals, now=1e9):
    return list(iter(lambda: arrivals.take_due(now), None))


def test_a_constant_schedule_is_even():
    slots = list(draws().iterate_schedule([CONSTANT], start=10.0))
    assert [slot.due_at for slot in slots] == [10 + number / 4 for number in range(8)]


def test_a_poisson_schedule_has_its_rate_and_is_without_memory():
    times = np.asarray([slot.due_at for slot in draws().iterate_schedule([POISSON], start=0.0)])
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    # An exponential's standard deviation is its mean, and one gap says nothing of the next.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.05
    assert times.max() < 20


def test_phases_follow_one_another():
    slots = list(draws().iterate_schedule([CONSTANT, POISSON, CONSTANT], start=5.0))
    assert [slot.phase_index for slot in slots] == sorted(slot.phase_index for slot in slots)
    for place, start, end in ((0, 5, 7), (1, 7, 27), (2, 27, 29)):
        times = [slot.due_at for slot in slots if slot.phase_index == place]
        assert start <= min(times) <= max(times) < end


def test_a_seed_says_when_and_which():
    first, again, other = (list(draws(seed).iterate_schedule([POISSON], 0.0)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_requests_are_drawn_as_often_as_they_should_be():
    numbers = list(itertools.islice(draws().draw_request_numbers(), 8000))
    assert numbers.count(1) == pytest.approx(6000, rel=0.05)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_a_schedule_without_changing_it(processes):
    whole = list(draws().iterate_schedule([CONSTANT, POISSON], 0.0))
    shares = [
        taken(OpenLoopSchedule([CONSTANT, POISSON], 0.0, 1.0, draws(), (index, processes)))
        for index in range(processes)
    ]
    assert sorted(itertools.chain(*shares)) == whole


def test_what_is_due_keeps_its_time():
    arrivals = OpenLoopSchedule([CONSTANT], 90.0, 1.0, draws())
    assert [slot.due_at for slot in taken(arrivals)][:2] == [90.0, 90.25]


def test_what_is_not_due_is_waited_for():
    arrivals = OpenLoopSchedule([CONSTANT], 100.0, 1.0, draws())
    assert arrivals.take_due(99.0) == 1.0
    assert arrivals.take_due(100.125).due_at == 100.0
    assert arrivals.take_due(100.125) == 0.125
    assert ClosedLoopSchedule(CONSTANT, 100.0, draws()).take_due(98.0) == 2.0


def test_what_is_late_is_sent_until_the_grace_is_over():
    assert OpenLoopSchedule([CONSTANT, POISSON], 10.0, 0.5, draws()).cutoff == 32.5
    assert ClosedLoopSchedule(CONSTANT, 10.0, draws()).cutoff == math.inf


def test_a_closed_loop_ends_with_its_phase():
    arrivals = ClosedLoopSchedule(CONSTANT, 100.0, draws())
    assert [arrivals.take_due(now).due_at for now in (100.0, 101.9)] == [100.0, 101.9]
    assert arrivals.take_due(102.0) is None


@pytest.mark.parametrize(
    "arrivals",
    [
        lambda: OpenLoopSchedule([CONSTANT], 100.0, 1.0, draws()),
        lambda: ClosedLoopSchedule(LoadPhase("c", "closed", 60, connections=1), 100.0, draws()),
    ],
)
def test_they_end_when_told_to(arrivals):
    made = arrivals()
    made.stop()
    assert made.take_due(100.0) is None
