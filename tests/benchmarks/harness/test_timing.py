import pytest

from benchmarks.harness.timing import compute_quantiles


def test_quantiles_of_many_times():
    assert compute_quantiles([float(t) for t in range(101)]) == pytest.approx((20.0, 50.0, 80.0))
