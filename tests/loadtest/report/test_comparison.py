import math
from dataclasses import replace

import numpy as np
import pytest
from normload.report import comparison

from tests.loadtest.conftest import made_result


def latencies(seed, count=4000, scale=1.0):
    return (scale * 0.01 * np.random.default_rng(seed).lognormal(0, 0.5, count)).tolist()


def changed(before, after):
    return {change.metric: change for change in comparison.compare_runs([before], [after]) if change.is_change}


@pytest.mark.parametrize("seed", range(5))
def test_equal_runs_do_not_differ(seed):
    before, after = made_result(latencies(seed), errors=5), made_result(latencies(seed + 100), errors=6)
    assert changed(before, after) == {}


def test_a_run_does_not_differ_from_itself():
    result = made_result(latencies(0), errors=5)
    assert changed(result, result) == {}


def test_higher_latencies_are_worse_and_lower_ones_better():
    slow, fast = made_result(latencies(0, scale=1.5)), made_result(latencies(1))
    for before, after, worse in ((fast, slow, True), (slow, fast, False)):
        found = changed(before, after)
        assert found.keys() >= {"p50", "p90", "p99"}
        assert all(change.is_worse is worse for change in found.values())
        assert found["p50"].low <= found["p50"].after / found["p50"].before <= found["p50"].high


def test_fewer_answers_are_worse():
    found = changed(made_result(latencies(0)), made_result(latencies(1, count=3000)))
    assert found.keys() == {"rate", "served"}
    assert all(change.is_worse for change in found.values())


def test_more_errors_are_worse():
    found = changed(made_result(latencies(0)), made_result(latencies(1), errors=200))
    assert found["errors"].is_worse
    assert found["errors"].after == pytest.approx(200 / 4200)


def test_a_tail_of_few_requests_is_noise():
    before, after = (made_result([*latencies(seed, 500), outlier]) for seed, outlier in ((0, 0.2), (1, 0.4)))
    assert "p99.9" not in changed(before, after)


def test_a_percentile_that_is_the_maximum_is_no_change():
    slow, fast = (made_result([0.01, 0.01, longest] * 10) for longest in (0.06, 0.015))
    assert {"p90"} <= changed(fast, slow).keys() <= {"p90", "served", "rate"}


def test_no_percentile_exceeds_the_maximum():
    result = made_result([0.0123456789] * 50)
    (p99,) = [each for each in comparison.compare_runs([result], [result]) if each.metric == "p99"]
    assert p99.before == pytest.approx(0.0123456789, rel=1e-12)


def test_runs_of_different_scenarios_are_not_compared():
    with pytest.raises(ValueError, match="one scenario"):
        comparison.compare_runs([made_result([0.01])], [made_result([0.01], scenario="burst")])


def test_other_loads_are_said():
    before, after = made_result([0.01], rate=100.0), made_result([0.01], rate=150.0)
    assert comparison.describe_load_differences([before], [before]) == []
    assert comparison.describe_load_differences([before], [after]) == [
        "steady: offered 100.0/s before and 150.0/s after."
    ]


def test_other_durations_are_said():
    before, after = made_result([0.01]), made_result([0.01])
    (only,) = after.phases
    only.phase = replace(only.phase, duration_s=2 * only.phase.duration_s)
    (sentence,) = comparison.describe_load_differences([before], [after])
    assert sentence == f"steady: {only.phase.duration_s / 2:.1f} s before and {only.phase.duration_s:.1f} s after."


@pytest.mark.parametrize("share", [0.004, 0.3133])
def test_rates_of_a_run_that_was_ended_early_are_of_its_time(share):
    result = made_result(latencies(0))
    (only,) = result.phases
    only.segment_s = share * only.phase.duration_s
    only.phase = replace(only.phase, duration_s=only.segment_s)
    (rate,) = [each for each in comparison.compare_runs([result], [result]) if each.metric == "rate"]
    assert rate.before == pytest.approx(result.all_phases.rate)


def several(seed, slower=1.0, between=0.03, runs=3, count=400):
    """Runs that differ by more than what each of them contains."""
    random = np.random.default_rng(seed)
    return [
        made_result(latencies(seed * 100 + number, count, scale=slower * np.exp(random.normal(0, between))))
        for number in range(runs)
    ]


@pytest.mark.slow
def test_19_of_20_comparisons_of_equal_servers_find_no_change():
    found = [
        any(change.is_change for change in comparison.compare_runs(several(2 * number), several(2 * number + 1)))
        for number in range(20)
    ]
    assert sum(found) <= 1


def test_the_spread_is_that_between_runs():
    sides = [made_result(latencies(0, count)) for count in (900, 1000, 1100)], [made_result(latencies(0, 1000))]
    (rate,) = [change for change in comparison.compare_runs(*sides) if change.metric == "rate"]
    assert rate.spread_before == pytest.approx(0.1, rel=0.01)
    assert math.isnan(rate.spread_after)
    (alone,) = [change for change in comparison.compare_runs(*[sides[1]] * 2) if change.metric == "rate"]
    assert math.isnan(alone.spread_before)


@pytest.mark.slow
def test_one_run_a_side_does_not_contain_what_several_do():
    between = [several(number, between=0.2) for number in range(12)]
    alone, together = (
        sum(
            any(change.is_change for change in comparison.compare_runs(old[:runs], new[:runs]))
            for old, new in zip(between[::2], between[1::2], strict=True)
        )
        for runs in (1, 3)
    )
    assert alone >= 4
    assert together <= 1


def test_several_runs_find_what_one_cannot():
    steady = {"between": 0.002, "runs": 5, "count": 4000}
    old, new = several(0, **steady), several(1, slower=1.05, **steady)
    assert not changed(old[0], new[0])
    found = {change.metric for change in comparison.compare_runs(old, new) if change.is_worse}
    assert "p50" in found


def test_runs_without_answers_say_nothing():
    changes = comparison.compare_runs([made_result([]), made_result([0.01] * 10)], [made_result([0.01] * 10)])
    assert not any(change.is_change for change in changes)
