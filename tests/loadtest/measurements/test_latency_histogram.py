import json
import math

import numpy as np
import pytest
from normload.measurements.latency_histogram import LatencyHistogram, compute_upper_bounds_s

VALUES = np.random.default_rng(0).lognormal(-6, 2, 20_000).tolist()


def histogram(values):
    made = LatencyHistogram()
    made.add_seconds(values)
    return made


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_percentiles_are_right_to_one_in_a_hundred(percent):
    exact = sorted(VALUES)[max(0, math.ceil(len(VALUES) * percent / 100 - 1e-6) - 1)]
    found = histogram(VALUES).compute_percentile_s(percent)
    assert exact - 1e-7 <= found <= exact * 1.01 + 1e-7


def test_percentiles_are_of_as_many_as_there_are():
    assert histogram([0.001] * 999 + [1.0]).compute_percentile_s(99.9) == pytest.approx(0.001, rel=0.01)
    assert histogram([0.001] * 998 + [1.0] * 2).compute_percentile_s(99.9) == pytest.approx(1.0)


def test_sum_count_and_maximum_are_exact():
    made = histogram(VALUES)
    assert (made.count, made.max_s) == (len(VALUES), max(VALUES))
    assert made.mean_s == pytest.approx(np.mean(VALUES))


def test_histograms_add_up():
    whole, parts = histogram(VALUES), histogram(VALUES[:7000])
    parts.merge(histogram(VALUES[7000:]))
    np.testing.assert_array_equal(whole.counts, parts.counts)
    assert parts.max_s == whole.max_s
    assert parts.mean_s == pytest.approx(whole.mean_s)


def test_values_beyond_its_range_are_kept_in_the_last_bucket():
    made = histogram([0.0, 1e6])
    assert made.count == 2
    assert made.compute_percentile_s(0) == pytest.approx(0, abs=1e-7)
    assert made.max_s == 1e6


def test_it_is_the_same_after_json():
    made = histogram(VALUES)
    again = LatencyHistogram.from_json(json.loads(json.dumps(made.to_json())))
    np.testing.assert_array_equal(again.counts, made.counts)
    assert (again.mean_s, again.max_s) == (made.mean_s, made.max_s)


def test_buckets_follow_one_another():
    uppers = compute_upper_bounds_s(np.arange(3000))
    assert (np.diff(uppers) > 0).all()
    for value in uppers[:2000:97]:
        assert histogram([value * 0.9999]).compute_percentile_s(50) <= value


def test_nothing_has_no_percentile():
    assert math.isnan(LatencyHistogram().compute_percentile_s(50))
    assert math.isnan(LatencyHistogram().mean_s)
