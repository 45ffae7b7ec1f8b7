"""Intervals of differences between sets of runs."""

import math

import numpy as np
import pytest
from normload.report.comparison import compute_difference_interval, compute_student_quantile


# Source: tables of Student's distribution.
@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [
        (0.995, 1, 63.657),
        (0.995, 2, 9.925),
        (0.975, 4, 2.776),
        (0.995, 10, 3.169),
        (0.5, 3, 0.0),
        (0.9995, 4, 8.610),
    ],
)
def test_quantiles_are_those_of_the_tables(probability, degrees, quantile):
    assert compute_student_quantile(probability, degrees) == pytest.approx(quantile, rel=1e-3, abs=1e-6)


def test_an_interval_holds_the_difference_as_often_as_it_says():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        low, high = compute_difference_interval(
            random.normal(1, 2, 3).tolist(), random.normal(4, 2, 2).tolist(), 0.9
        )
        held += low <= 3 <= high
    assert held == pytest.approx(900, abs=40)


def test_without_spread_it_is_the_difference():
    assert compute_difference_interval([1.0, 1.0], [3.0], 0.99) == (2.0, 2.0)
    assert math.isfinite(compute_difference_interval([1.0, 2.0], [3.0], 0.999)[1])
