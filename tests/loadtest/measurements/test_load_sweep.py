import math

from normload.measurements.load_sweep import SweepPoint, evaluate_sweep


def queue(load, capacity=100.0, service_s=0.01):
    """A server with one queue: latency grows as 1 / (1 - utilisation)."""
    used = min(load / capacity, 0.999)
    return SweepPoint(f"{load:g}", load, load, min(load, capacity), service_s / (1 - used), 0.0)


def test_the_knee_of_one_queue_is_at_half_of_its_capacity():
    found = evaluate_sweep([queue(load) for load in range(10, 130, 10)])
    assert found.knee.offered == 50
    assert found.sustained.offered == 100
    assert found.peak == 100


def test_a_server_that_does_not_slow_down_has_its_knee_at_its_capacity():
    points = [
        SweepPoint("", load, load, min(load, 100), 0.01 if load <= 100 else 1.0, 0.0) for load in (40, 80, 100, 120)
    ]
    assert evaluate_sweep(points).knee.offered == 100


def test_refusals_are_not_sustained():
    points = [SweepPoint("", load, load, load * 0.97, 0.01, 0.03 if load > 50 else 0.0) for load in (20, 40, 60)]
    assert evaluate_sweep(points).sustained.offered == 40
    assert (
        evaluate_sweep([SweepPoint("", load, load, load / 2, 0.01, 0.0) for load in (20, 40, 60)]).sustained is None
    )


def test_a_load_of_which_every_request_was_answered_is_sustained_however_many_random_arrivals_there_were():
    points = [SweepPoint("", load, 0.9 * load, 0.9 * load, 0.01, 0.0) for load in (20, 40, 60)]
    assert evaluate_sweep(points).sustained.offered == 60


def test_few_loads_have_no_knee():
    assert evaluate_sweep([]) is None
    assert evaluate_sweep([queue(10), queue(20), queue(20)]) is None
    assert evaluate_sweep([queue(10), queue(20), SweepPoint("", 30, 30, 0.0, math.nan, 1.0)]) is None


def test_a_knee_lies_between_the_lowest_and_the_highest_load():
    rising = [queue(load) for load in (10, 20, 30, 40)]
    assert evaluate_sweep(rising).knee is None
    assert evaluate_sweep(rising).sustained.offered == 40
    falling = [queue(load) for load in (60, 70, 90)]
    assert evaluate_sweep(falling).knee is None
    assert evaluate_sweep(falling).peak == 90


def test_a_small_decrease_of_power_is_no_knee():
    points = [SweepPoint("", load, load, load, 0.01, 0.0) for load in (10, 20, 30, 40)]
    noisy = SweepPoint("", 50, 50, 50, 0.013, 0.0)
    assert evaluate_sweep([*points, noisy]).knee is None
    assert evaluate_sweep([*points, noisy, SweepPoint("", 60, 60, 50, 0.5, 0.0)]).knee.offered == 40
